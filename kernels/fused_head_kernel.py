"""The fused head as one Triton launch.

    feature[n, f] = pool of x[n, c] over window (i, j),    f = (c * grid_h + i) * grid_w + j
    logit[n, k]   = sum_f feature[n, f] * weight[k, f] + bias[k]
    probs[n]      = softmax(logit[n] / temperature)
    exit[n]       = max_k probs[n, k] > threshold

Each program pools a block of features of one sample (or of a group of samples) and multiplies it with its columns of
the weight. The partial logits go to a workspace; the program that arrives last adds them up in a fixed order, so that
results repeat bit for bit, and does the softmax and the check. Prefixes: ``pid_`` program, ``off_`` index along a
dimension, ``mask_`` what of it exists, ``acc_`` float32 accumulator.
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arrival_counters import arrival_counters
from .head_output import HeadOutput
from .head_view import HeadView
from .launch_config import LaunchConfig

#: Triton's interpreter runs the kernel on CPU tensors (TRITON_INTERPRET=1 when this module was imported).
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def window_bounds(off, SIZE, GRID):
    """Window ``off`` of GRID over SIZE elements, as torch.nn.AdaptiveAvgPool2d cuts it: [start, end)."""
    scaled = off.to(tl.int64) * SIZE
    return (scaled // GRID).to(tl.int32), ((scaled + SIZE + GRID - 1) // GRID).to(tl.int32)


@triton.jit
def pooled_features(
    x, stride_xn, stride_xc, stride_xh, stride_xw,  # [N, C, H, W]
    off_n, mask_n, off_c, off_p, mask_f, start_w_part, end_w_part,
    H, W, GRID_H, GRID_W, WINDOW_H,
    POOL_MAX: tl.constexpr, ONE_WINDOW: tl.constexpr, BLOCK_A: tl.constexpr,
):  # fmt: skip
    """Pool features [BLOCK_F] of samples [BLOCK_N] to float32 [BLOCK_N, BLOCK_F]; 0 where masked.

    Of each window only the columns from ``start_w_part`` to ``end_w_part`` are read; an average is their share of it.
    """
    if ONE_WINDOW:  # plain sizes instead of vectors of bounds: the compiler then sees contiguous reads
        start_h = tl.zeros_like(off_p)
        start_w = tl.zeros_like(off_p)
        size_h = start_h + H
        size_w = start_w + W
    else:
        start_h, end_h = window_bounds(off_p // GRID_W, H, GRID_H)
        start_w, end_w = window_bounds(off_p % GRID_W, W, GRID_W)
        size_h = end_h - start_h
        size_w = end_w - start_w
    base = x + off_n.to(tl.int64)[:, None] * stride_xn + (off_c.to(tl.int64) * stride_xc)[None, :]
    if not ONE_WINDOW:
        base += (start_h.to(tl.int64) * stride_xh + start_w.to(tl.int64) * stride_xw)[None, :]
    mask = mask_n[:, None] & mask_f[None, :]
    nothing: tl.constexpr = float("-inf") if POOL_MAX else 0.0
    acc = tl.full((off_n.shape[0], off_c.shape[0], BLOCK_A), nothing, tl.float32)
    acc_nan = tl.zeros((off_n.shape[0], off_c.shape[0], BLOCK_A), tl.int32)
    for off_h in range(0, WINDOW_H):
        for start_a in range(start_w_part, end_w_part, BLOCK_A):
            off_a = start_a + tl.arange(0, BLOCK_A)
            if ONE_WINDOW:
                mask_a = mask[:, :, None] & (off_a < end_w_part)[None, None, :]
            else:
                inside = (off_h < size_h)[:, None] & (off_a[None, :] < size_w[:, None])
                mask_a = mask[:, :, None] & inside[None, :, :]
            offset = tl.cast(off_h, tl.int64) * stride_xh + off_a.to(tl.int64) * stride_xw
            value = tl.load(base[:, :, None] + offset[None, None, :], mask=mask_a, other=nothing).to(tl.float32)
            if POOL_MAX:
                acc = tl.maximum(acc, value)
                acc_nan |= (value != value).to(tl.int32)  # a maximum on the GPU drops NaN; PyTorch's keeps it
            else:
                acc += value
    if POOL_MAX:
        pooled = tl.where(tl.max(acc_nan, axis=2) != 0, float("nan"), tl.max(acc, axis=2))
    else:
        area = tl.maximum(size_h * size_w, 1).to(tl.float32)
        pooled = tl.div_rn(tl.sum(acc, axis=2), area[None, :])
    return tl.where(mask, pooled, 0.0)


@triton.jit
def logits_block(
    partial, bias, stride_bk, off_n, mask_n, off_k, N, K, SPLITS,
    HAS_BIAS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add up partial logits [SPLITS, N, K] of samples [BLOCK_N] and classes [BLOCK_J], in the order of the splits."""
    mask_k = off_k < K
    mask = mask_n[:, None] & mask_k[None, :]
    offset = off_n.to(tl.int64)[:, None] * K + off_k[None, :]
    logits = tl.zeros((off_n.shape[0], off_k.shape[0]), tl.float32)
    for start_s in range(0, SPLITS, BLOCK_S):
        off_s = start_s + tl.arange(0, BLOCK_S)
        pointer = partial + (off_s.to(tl.int64) * N * K)[:, None, None] + offset[None, :, :]
        # .cg: other SMs wrote them, and this SM's L1 may hold older lines
        logits += tl.sum(
            tl.load(pointer, mask=(off_s < SPLITS)[:, None, None] & mask[None, :, :], other=0.0, cache_modifier=".cg"),
            axis=0,
        )
    if HAS_BIAS:
        logits += tl.load(bias + off_k.to(tl.int64) * stride_bk, mask=mask_k, other=0.0).to(tl.float32)[None, :]
    return logits


@triton.jit
def shifted_exp(scaled, top):
    """exp(scaled - top), with 0 for a class at -inf even while no larger one was seen."""
    return tl.exp(scaled - tl.where(top == float("-inf"), 0.0, top)[:, None])


@triton.jit
def fused_head_kernel(
    x, stride_xn, stride_xc, stride_xh, stride_xw,  # [N, C, H, W]
    weight, stride_wk, stride_wf,  # [K, C * GRID_H * GRID_W]
    bias, stride_bk,  # [K]
    temperature, threshold,  # float32: numbers, or pointers to one
    probs,  # [N, K] float32, contiguous
    label, confidence, exits,  # [N] int64, float32, bool, contiguous
    partial,  # [SPLITS, N, K] float32
    arrived,  # [groups of samples] int32, 0 before and after
    N, C, H, W, K, GRID_H, GRID_W, WINDOW_H, WINDOW_W, SPLITS,
    POOL_MAX: tl.constexpr, ONE_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, WRITE_PROBS: tl.constexpr,
    TEMPERATURE_TENSOR: tl.constexpr, THRESHOLD_TENSOR: tl.constexpr,
    ONE_BLOCK: tl.constexpr, DOT_DTYPE: tl.constexpr,
    WINDOW_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """See the module's docstring; the launcher below has validated and sized everything."""
    POSITIONS = GRID_H * GRID_W
    pid_split = tl.program_id(0) % SPLITS
    pid_group = tl.program_id(0) // SPLITS
    off_n = pid_group * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = off_n < N

    # pool
    pid_part = pid_split % WINDOW_PARTS
    pid_block = pid_split // WINDOW_PARTS
    part_w = tl.cdiv(tl.cdiv(WINDOW_W, BLOCK_A), WINDOW_PARTS) * BLOCK_A
    off_f = tl.arange(0, BLOCK_C * BLOCK_P)
    blocks_p = tl.cdiv(POSITIONS, BLOCK_P)
    if ONE_WINDOW:
        off_c = pid_block * BLOCK_C + off_f
        off_p = tl.zeros_like(off_f)
    else:
        off_c = pid_block // blocks_p * BLOCK_C + off_f // BLOCK_P
        off_p = pid_block % blocks_p * BLOCK_P + off_f % BLOCK_P
    mask_f = (off_c < C) & (off_p < POSITIONS)
    features = pooled_features(
        x, stride_xn, stride_xc, stride_xh, stride_xw, off_n, mask_n, off_c, off_p, mask_f,
        pid_part * part_w, tl.minimum((pid_part + 1) * part_w, WINDOW_W),
        H, W, GRID_H, GRID_W, WINDOW_H, POOL_MAX, ONE_WINDOW, BLOCK_A,
    )  # fmt: skip

    # multiply
    column = weight + (off_c.to(tl.int64) * POSITIONS + off_p) * stride_wf
    row = partial + (pid_split.to(tl.int64) * N + off_n) * K
    for start_k in range(0, K, BLOCK_K):
        off_k = start_k + tl.arange(0, BLOCK_K)
        mask_k = off_k < K
        pointer = column[None, :] + (off_k.to(tl.int64) * stride_wk)[:, None]
        block = tl.load(pointer, mask=mask_k[:, None] & mask_f[None, :], other=0.0)  # [BLOCK_K, BLOCK_F]
        if BLOCK_N == 1:
            product = tl.sum(block.to(tl.float32) * features, axis=1)[None, :]
        else:
            product = tl.dot(features.to(DOT_DTYPE), tl.trans(block.to(DOT_DTYPE)), input_precision="ieee")
        tl.store(row[:, None] + off_k[None, :], product, mask=mask_n[:, None] & mask_k[None, :])

    # the last program of these samples goes on; the barrier puts every thread's stores before the one thread's arrival
    tl.debug_barrier()
    if tl.atomic_add(arrived + pid_group, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
        return
    tl.store(arrived + pid_group, 0)

    # decide: one pass for the largest logit, its class and the sum of exponentials, a second one for the probabilities;
    # the class is that of the largest logit before the temperature, whose division may make equals of them
    heat = tl.zeros((BLOCK_N,), tl.float32) + (tl.load(temperature) if TEMPERATURE_TENSOR else temperature)
    limit = tl.load(threshold) if THRESHOLD_TENSOR else threshold
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    top_logit = top
    best = tl.zeros((BLOCK_N,), tl.int32)
    exps = tl.zeros((BLOCK_N, BLOCK_J), tl.float32)
    for start_k in range(0, K, BLOCK_J):
        off_j = start_k + tl.arange(0, BLOCK_J)
        logits = logits_block(partial, bias, stride_bk, off_n, mask_n, off_j, N, K, SPLITS, HAS_BIAS, BLOCK_S)
        logits = tl.where((off_j < K)[None, :], logits, float("-inf"))
        scaled = tl.div_rn(logits, heat[:, None])
        # NaN ranks as the largest, so that the label is always a class; its exponential makes the total NaN
        ranked = tl.where(logits != logits, float("inf"), logits)
        block_top, block_best = tl.max(ranked, axis=1, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(block_top > top_logit, start_k + block_best, best)
        top_logit = tl.maximum(top_logit, block_top)
        new_top = tl.div_rn(top_logit, heat)
        exps = shifted_exp(scaled, new_top)
        total = total * tl.exp(top - tl.where(new_top == float("-inf"), 0.0, new_top)) + tl.sum(exps, axis=1)
        top = new_top
        if WRITE_PROBS and not ONE_BLOCK:
            pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
            tl.store(pointer, scaled, mask=mask_n[:, None] & (off_j < K)[None, :])
    sure = tl.where(top == float("-inf"), float("nan"), tl.div_rn(1.0, total))
    tl.store(label + off_n, best.to(tl.int64), mask=mask_n)
    tl.store(confidence + off_n, sure, mask=mask_n)
    tl.store(exits + off_n, (sure > limit) & (heat > 0), mask=mask_n)
    if WRITE_PROBS:
        if not ONE_BLOCK:
            tl.debug_barrier()
        for start_k in range(0, K, BLOCK_J):
            off_j = start_k + tl.arange(0, BLOCK_J)
            mask = mask_n[:, None] & (off_j < K)[None, :]
            pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
            if not ONE_BLOCK:
                exps = shifted_exp(tl.load(pointer, mask=mask, other=0.0), top)
            tl.store(pointer, tl.div_rn(exps, total[:, None]), mask=mask)


_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


_compiled: dict[tuple[Hashable, ...], Any] = {}


def launch_fused_head(
    x: Tensor,
    view: HeadView,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor | float,
    threshold: Tensor | float,
    *,
    pool_max: bool,
    return_probs: bool,
    config: LaunchConfig,
) -> HeadOutput:
    """Run the kernel once on arguments that were checked; N is at least 1.

    Temperature and threshold are floats or one-element tensors on the device of x, which ``view`` views; the other
    arguments are those of :func:`auxhead.kernels.fused_head`.
    """
    samples, channels, height, width = view.shape
    classes = weight.shape[0]
    groups, splits = config.programs(samples, channels, view.positions)
    probs = x.new_empty((samples, classes) if return_probs else 0, dtype=torch.float32)
    label = x.new_empty(samples, dtype=torch.int64)
    confidence = x.new_empty(samples, dtype=torch.float32)
    exits = x.new_empty(samples, dtype=torch.bool)
    partial = x.new_empty(splits, samples, classes, dtype=torch.float32)
    with torch.cuda.device_of(x):
        arguments = (
            x, *view.strides,
            weight, *weight.stride(),
            bias, 0 if bias is None else bias.stride(0),
            temperature, threshold,
            probs, label, confidence, exits,
            partial, arrival_counters(x.device).take(groups),
            samples, channels, height, width, classes,
            view.grid_h, view.grid_w, view.window_h, view.window_w, splits,
            pool_max, view.positions == config.block_p == 1, bias is not None, return_probs,
            isinstance(temperature, Tensor), isinstance(threshold, Tensor),
            classes <= config.block_j,
            tl.float32 if INTERPRETED else _DOT_DTYPES[x.dtype],  # the interpreter multiplies bfloat16 wrongly
            config.window_parts,
            config.block_n, config.block_c, config.block_p, config.block_a,
            config.block_k, config.block_s, config.block_j,
        )  # fmt: skip
        # All that Triton would look at to choose a compiled kernel, which is half of what its launch costs the host.
        pointers = tuple(t is None or t.data_ptr() % 16 for t in (x, weight, bias))
        rules = tuple(t.data_ptr() % 16 if isinstance(t, Tensor) else None for t in (temperature, threshold))
        strides = (weight.stride(), bias is None or bias.stride(0))
        key = (x.device, x.dtype, view, classes, strides, pointers, rules, pool_max, return_probs, config)
        compiled = _compiled.get(key)
        if compiled is not None:
            compiled[(groups * splits, 1, 1)](*arguments)
        else:
            _compiled[key] = fused_head_kernel[(groups * splits,)](*arguments, num_warps=config.num_warps)
    return HeadOutput(probs if return_probs else None, label, confidence, exits)
