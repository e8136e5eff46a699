"""Decide about samples: add the parts of their logits up; softmax, class, confidence and exit; see head.py."""

import triton
import triton.language as tl

from .criteria import MARGIN, MAX_PROB, confidence_of, update_state
from .hand_over import awaited, seen


@triton.jit
def logits_block(product, sums, bias, off_n, off_k, N, K, WAITS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return logits, or a hidden layer's sums, of samples [BLOCK_N], rows [BLOCK_J]; arguments as of ``decide``."""
    mask_k = off_k < K
    bias, stride_bk = bias
    if bias is not None:  # on its way while the sums are
        shift = tl.load(bias + off_k.to(tl.int64) * stride_bk, mask=mask_k, other=0.0)
    if product is not None:
        logits = product
    else:
        logits = tl.zeros((off_n.shape[0], off_k.shape[0]), tl.float32)
        partial, stride_ps, stride_pn, stride_pk, row_width, PARTS = sums
        mask = (off_n < N)[:, None] & (off_k < row_width)[None, :]
        offset = off_n.to(tl.int64)[:, None] * stride_pn + off_k.to(tl.int64)[None, :] * stride_pk
        for start_s in range(0, PARTS, BLOCK_S):
            off_s = start_s + tl.arange(0, BLOCK_S)
            pointer = partial + (off_s.to(tl.int64) * stride_ps)[:, None, None] + offset[None, :, :]
            mask_s = (off_s < PARTS)[:, None, None] & mask[None, :, :]
            if WAITS:
                logits += tl.sum(awaited(seen(pointer, mask_s), pointer, mask_s), axis=0)
                tl.debug_barrier()  # several threads may have waited for one number
                tl.store(pointer, 0, mask=mask_s)
            else:
                # .cg: other SMs wrote them, and this SM's L1 may hold older lines
                block = tl.load(pointer, mask=mask_s, other=0.0, cache_modifier=".cg")
                logits += tl.sum(block.to(tl.float32), axis=0)
    if bias is not None:
        logits += shift.to(tl.float32)[None, :]
    return logits


@triton.jit
def dealt_out(product, BLOCK: tl.constexpr):
    """Return numbers [1, BLOCK] with a few of them in each thread: a sum of products leaves all of them in many."""
    if BLOCK < 32:
        return product
    return tl.gather(product, tl.arange(0, BLOCK)[None, :], 1)


@triton.jit
def heated_exp(logits, top, cold):
    """Return exp((logits - top) * cold), 0 for a class at -inf even while no larger one was seen."""
    return tl.exp((logits - tl.where(top == float("-inf"), 0.0, top)[:, None]) * cold)


@triton.jit
def first_maximum(logits, off_k):
    """Return the largest of each row and the first class that has it, from one reduction of both in an integer.

    NaN ranks as the largest, so that there always is such a class; its exponential makes the total NaN.
    """
    ranked = tl.where(logits != logits, float("inf"), logits) + 0.0  # -0.0 becomes 0.0
    bits = ranked.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the numbers
    best = tl.max((ordered.to(tl.int64) << 32) | (0x7FFFFFFF - off_k).to(tl.int64), axis=1)
    ordered = (best >> 32).to(tl.int32)
    top = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return top, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def decide(
    product,  # [BLOCK_N, BLOCK_J]: the sums of all parts, or None
    sums,  # parts of them [PARTS, N, row], their strides, length of a row and PARTS; read if there is no product
    bias, rule, output, off_n, N, K: tl.constexpr,  # rule: temperature and threshold; output: see exit_kernel
    CRITERION: tl.constexpr, WAITS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Decide about samples [BLOCK_N]: softmax, class, confidence, exit. WAITS: parts may not be there yet.

    One pass for the largest logit, its class and the sum of exponentials, a second one for the probabilities. Distances
    from the largest logit are multiplied by 1 / temperature, not the logits, of which that may make equals.
    """
    probs, _, _, _ = output
    mask_n = off_n < N
    heat, cold = heat_of(rule, off_n)
    top = tl.full((off_n.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((off_n.shape[0],), tl.float32)
    best = tl.zeros((off_n.shape[0],), tl.int32)
    exps = tl.zeros((off_n.shape[0], BLOCK_J), tl.float32)
    state = tl.full((off_n.shape[0],), float("-inf") if CRITERION == MARGIN else 0.0, tl.float32)
    for start_k in range(0, K, BLOCK_J):
        off_j = start_k + tl.arange(0, BLOCK_J)
        logits = logits_block(product, sums, bias, off_n, off_j, N, K, WAITS, BLOCK_S)
        logits = tl.where((off_j < K)[None, :], logits, float("-inf"))
        block_top, first = first_maximum(logits, off_j[None, :])
        new_top = tl.maximum(top, block_top)
        exps = heated_exp(logits, new_top, cold)
        best = tl.where(block_top > top, first, best)
        decay = tl.sum(heated_exp(top[:, None], new_top, cold), axis=1)
        if CRITERION != MAX_PROB:
            state = update_state(
                state, logits, exps, off_j, first, block_top, top, new_top, total, decay, cold, CRITERION
            )  # fmt: skip
        # 0 at first, which a temperature that is no positive number makes NaN, and with it all later totals
        total = total * decay + tl.sum(exps, axis=1)
        top = new_top
        if probs is not None and BLOCK_J < K:  # kept for write_probs
            pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
            tl.store(pointer, logits, mask=mask_n[:, None] & (off_j < K)[None, :])
    sure = write_answer(top, total, best, state, heat, cold, rule, output, off_n, mask_n, K, CRITERION)
    if probs is not None:
        if BLOCK_J < K:
            tl.debug_barrier()
        for start_k in range(0, K, BLOCK_J):
            write_probs(probs, exps, top, sure, cold, off_n, mask_n, start_k, K, BLOCK_J)


@triton.jit
def heat_of(rule, off_n):
    """Return the temperature [BLOCK_N], called heat, and its reciprocal [BLOCK_N, 1], cold."""
    heat = tl.zeros((off_n.shape[0],), tl.float32) + rule[0]
    return heat, tl.div_rn(1.0, heat)[:, None]


@triton.jit
def largest_probability(top, total):
    """Return it [BLOCK_N] from the largest logit and the exponentials' sum; NaN where no logit is above -inf."""
    return tl.where(top == float("-inf"), float("nan"), tl.div_rn(1.0, total))


@triton.jit
def write_answer(
    top, total, best, state, heat, cold, rule, output, off_n, mask_n, K: tl.constexpr, CRITERION: tl.constexpr
):  # fmt: skip
    """Write class, confidence and exit of samples [BLOCK_N]; returns the largest probability."""
    _, label, confidence, exits = output
    sure = largest_probability(top, total)
    tl.store(label + off_n, best.to(tl.int64), mask=mask_n)
    score = sure if CRITERION == MAX_PROB else confidence_of(state, sure, top, total, heat, cold, K, CRITERION)
    tl.store(confidence + off_n, score, mask=mask_n)
    tl.store(exits + off_n, (score > rule[1]) & (heat > 0), mask=mask_n)
    return sure


@triton.jit
def write_probs(probs, exps, top, sure, cold, off_n, mask_n, start_k, K: tl.constexpr, BLOCK_J: tl.constexpr):
    """Write a block of probabilities of samples [BLOCK_N]; of more than one block the logits stand in their place."""
    off_j = start_k + tl.arange(0, BLOCK_J)
    mask = mask_n[:, None] & (off_j < K)[None, :]
    pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
    if BLOCK_J < K:
        exps = heated_exp(tl.load(pointer, mask=mask, other=0.0), top, cold)
    tl.store(pointer, exps * sure[:, None], mask=mask)
