"""Triton kernel of attention over few tokens; kernels/attention.py launches it.

    out[n, i, h] = softmax(scale * query[n, h, i] . key[n, h, :] + bias[n % BIASES, h, i, :]) value[n, h, :]

A program takes a block of queries of a head and all its keys at once. Libraries take blocks of 128 queries, so that of
one image most of a GPU has nothing to do. Prefixes of names: see ``head``.
"""

import triton
import triton.language as tl

from .hand_over import await_launch_before, dot


# Strides of what is attended to are steps from one sample, head and token to the next; DIM lies together.
@triton.jit
def attention_kernel(
    query,  # [N, HEADS, QUERIES, DIM], and its strides
    QUERY_N, QUERY_H, QUERY_T,
    key,  # [N, HEADS, KEYS, DIM], and its strides
    KEY_N, KEY_H, KEY_T,
    value,  # [N, HEADS, KEYS, DIM], and its strides
    VALUE_N, VALUE_H, VALUE_T,
    bias,  # [BIASES, HEADS, QUERIES, KEYS], and its strides, or none
    BIAS_N, BIAS_H, BIAS_Q, BIAS_K,
    out,  # [N, QUERIES, HEADS, DIM], dense
    HEADS, QUERIES, KEYS, BIASES, scale,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    """Attend from a block of queries, in float32 but for the products' operands; the launcher has sized everything."""
    blocks = tl.cdiv(QUERIES, BLOCK_Q)
    pid_q = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % HEADS
    sample = tl.program_id(0) // blocks // HEADS
    off_q = pid_q * BLOCK_Q + tl.arange(0, BLOCK_Q)
    off_k = tl.arange(0, BLOCK_K)
    off_d = tl.arange(0, BLOCK_D)
    mask_q = (off_q < QUERIES)[:, None] & (off_d < DIM)[None, :]
    mask_k = (off_k < KEYS)[:, None] & (off_d < DIM)[None, :]
    await_launch_before(EARLY_START)
    pointer = query + sample * QUERY_N + head * QUERY_H + off_q[:, None] * QUERY_T + off_d[None, :]
    queries = tl.load(pointer, mask=mask_q, other=0.0)
    pointer = key + sample * KEY_N + head * KEY_H + off_k[:, None] * KEY_T + off_d[None, :]
    keys = tl.load(pointer, mask=mask_k, other=0.0)
    pointer = value + sample * VALUE_N + head * VALUE_H + off_k[:, None] * VALUE_T + off_d[None, :]
    values = tl.load(pointer, mask=mask_k, other=0.0)
    scores = dot(queries, tl.trans(keys), tl.zeros((BLOCK_Q, BLOCK_K), tl.float32), "ieee") * scale
    if bias is not None:
        pointer = bias + sample % BIASES * BIAS_N + head * BIAS_H + off_q[:, None] * BIAS_Q + off_k[None, :] * BIAS_K
        mask = (off_q < QUERIES)[:, None] & (off_k < KEYS)[None, :]
        scores += tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    scores = tl.where((off_k < KEYS)[None, :], scores, float("-inf"))
    top = tl.max(scores, 1)
    top = tl.where(top == float("-inf"), 0.0, top)  # of a query that attends to nothing, whose answer is 0
    weights = tl.exp(scores - top[:, None])
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    acc = dot(weights.to(value.dtype.element_ty), values, acc, "ieee")
    total = tl.sum(weights, 1)
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    pointer = out + ((sample * QUERIES + off_q[:, None]) * HEADS + head) * DIM + off_d[None, :]
    tl.store(pointer, acc.to(out.dtype.element_ty), mask=mask_q)
