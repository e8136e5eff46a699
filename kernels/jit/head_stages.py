"""Stages of a fused head (pool, product, softmax, decision), shared by fused_head_kernel and exit_kernel.

    feature[n, f] = pool of x[n, c] over window (i, j),    f = (c * GRID_H + i) * GRID_W + j
    logit[n, k]   = sum_f feature[n, f] * weight[k, f] + bias[k],    or of a head with hidden layers
    hidden[n, h]  = activation(sum_f norm(feature[n])[f] * weight[h, f] + bias[h])
    logit[n, k]   = sum_h hidden[n, h] * last_weight[k, h] + last_bias[k]
    probs[n]      = softmax(logit[n] / temperature)
    exit[n]       = confidence[n] > threshold,    such as max_k probs[n, k]; see criteria_kernel

Two ways lead to the logits, and the configuration chooses:

*   split: each program pools a block of features of one sample and multiplies it with its columns of the weight. The
    partial logits go to a workspace; one program of the sample, the last to arrive or the last of all, adds them up in
    a fixed order.
*   tiled, for batches or many classes: the first programs pool; the next ones wait until a sample, or a group of them,
    is pooled and multiply it with some rows of the weight, a group on tensor cores; the last ones wait for the logits
    of a sample.

Nothing may wait for a program that cannot start. Programs start in the order of their numbers, and those that are
waited for have the smaller ones. CUDA's documentation does not promise that order, but NVIDIA's own scan waits on it
("blocks are launched in increasing order", ``cub/agent/agent_scan.cuh``), as in ``torch.cumsum`` of a vector.
Numbers drawn in the order of starting would not need it; they cost 1 to 3 us of a head's 6 to 20 (1,000 classes, batch
32 and 128, H200).

Either way one program then decides about a sample: softmax, class, confidence, exit. Sums are float32 and their order
is fixed, so that results repeat bit for bit. Prefixes: ``pid_`` program, ``off_`` index along a dimension, ``mask_``
True for indices that exist, ``acc_`` float32 accumulator.
"""

import triton
import triton.language as tl

from ..launch import launch_config
from .criteria import MARGIN, MAX_PROB, confidence_of, update_state
from .hand_over import awaited, awaited_sum, rows_waited_for, seen, send
from .hidden_layers import (
    NO_ACTIVATION,
    activated,
    classes_at_once,
    norm_statistics,
    normed,
    rectified,
    sample_features,
    softmax_block,
)

#: Triton's interpreter runs the kernels on CPU tensors (TRITON_INTERPRET=1 when this module was imported).
INTERPRETED = bool(triton.knobs.runtime.interpret)

ROW_UNIT = tl.constexpr(launch_config.ROW_UNIT)


@triton.jit
def window_bounds(off, SIZE, GRID):
    """Return start and end (exclusive) of window ``off`` of GRID over SIZE elements, as torch.nn.AdaptiveAvgPool2d."""
    scaled = off.to(tl.int64) * SIZE
    return (scaled // GRID).to(tl.int32), ((scaled + SIZE + GRID - 1) // GRID).to(tl.int32)


@triton.jit
def pooled_features(
    x, stride_xn, stride_xc, stride_xh, stride_xw,  # [N, C, H, W]
    pid_n, off_c, off_p, mask_f, start_w_part, end_w_part,
    H, W, GRID_H, GRID_W, WINDOW_H,
    POOL_MAX: tl.constexpr, ONE_WINDOW: tl.constexpr, BLOCK_A: tl.constexpr, STAGES: tl.constexpr,
    RECTIFIES: tl.constexpr,
):  # fmt: skip
    """Pool features [BLOCK_F] of sample ``pid_n``, those of its ReLU if RECTIFIES, to float32; 0 where masked.

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
    base = x + tl.cast(pid_n, tl.int64) * stride_xn + off_c.to(tl.int64) * stride_xc
    if not ONE_WINDOW:
        base += start_h.to(tl.int64) * stride_xh + start_w.to(tl.int64) * stride_xw
    nothing: tl.constexpr = float("-inf") if POOL_MAX else 0.0
    acc = tl.full((off_c.shape[0], BLOCK_A), nothing, tl.float32)
    acc_nan = tl.zeros((off_c.shape[0], BLOCK_A), tl.int32)
    for off_h in range(0, WINDOW_H):
        for start_a in tl.range(start_w_part, end_w_part, BLOCK_A, num_stages=STAGES):
            off_a = start_a + tl.arange(0, BLOCK_A)
            if ONE_WINDOW:
                mask_a = mask_f[:, None] & (off_a < end_w_part)[None, :]
            else:
                mask_a = mask_f[:, None] & (off_h < size_h)[:, None] & (off_a[None, :] < size_w[:, None])
            offset = tl.cast(off_h, tl.int64) * stride_xh + off_a.to(tl.int64) * stride_xw
            value = tl.load(base[:, None] + offset[None, :], mask=mask_a, other=nothing).to(tl.float32)
            if RECTIFIES and not POOL_MAX:
                value = rectified(value)
            if POOL_MAX:
                acc = tl.maximum(acc, value)
                acc_nan |= (value != value).to(tl.int32)  # a maximum on the GPU drops NaN; PyTorch's keeps it
            else:
                acc += value
    if POOL_MAX:
        pooled = tl.where(tl.max(acc_nan, axis=1) != 0, float("nan"), tl.max(acc, axis=1))
        if RECTIFIES:
            pooled = rectified(pooled)
    elif ONE_WINDOW:  # one division instead of one for each feature that a thread has
        pooled = tl.sum(acc, axis=1) * tl.div_rn(1.0, tl.zeros((), tl.float32) + H * W)
    else:
        area = tl.maximum(size_h * size_w, 1).to(tl.float32)
        pooled = tl.div_rn(tl.sum(acc, axis=1), area)
    return tl.where(mask_f, pooled, 0.0)


@triton.jit
def weight_block(column, stride_wk, mask_f, off_k, K):
    """Read rows [BLOCK_K] of the weight at the features that ``column`` points to; 0 where masked."""
    pointer = column[None, :] + (off_k.to(tl.int64) * stride_wk)[:, None]
    return tl.load(pointer, mask=(off_k < K)[:, None] & mask_f[None, :], other=0.0)


@triton.jit
def group_features(read, other, pointer, part_size, mask, WINDOW_PARTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Wait for features [BLOCK_N, BLOCK_F] of a group and add up their parts; ``read``, ``other``: read by ``seen``."""
    if WINDOW_PARTS == 1:
        features = awaited(read, pointer, mask, INTERPRETED)
    else:
        features = awaited_sum(read, other, pointer, pointer + part_size, mask, INTERPRETED)
        for _ in range(2, WINDOW_PARTS, 2):
            pointer += 2 * part_size
            read, other = seen(pointer, mask), seen(pointer + part_size, mask)
            features += awaited_sum(read, other, pointer, pointer + part_size, mask, INTERPRETED)
    return features


@triton.jit
def group_product(features, block, tile, INTERPRETED: tl.constexpr):
    """Add the product of features [BLOCK_N, BLOCK_F] and a block [BLOCK_K, BLOCK_F] of the weight to a tile."""
    if INTERPRETED:  # it multiplies bfloat16 wrongly
        tile = tl.dot(features, tl.trans(block.to(tl.float32)), tile, input_precision="ieee")
    else:
        tile = tl.dot(features.to(block.dtype), tl.trans(block), tile, input_precision="ieee")
    return tile


@triton.jit
def logits_block(
    product,  # [BLOCK_N, BLOCK_J]: if ALONE, the sum itself
    partial, stride_ps, stride_pn, stride_pk,  # [SPLITS, N, K]
    bias, stride_bk, off_n, mask_n, off_k, K, row_width, SPLITS,
    ALONE: tl.constexpr, WAITS: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add up partial logits of samples [BLOCK_N] and classes [BLOCK_J], in the order of the splits, and the bias."""
    mask_k = off_k < K
    if bias is not None:  # on its way while the sums are
        shift = tl.load(bias + off_k.to(tl.int64) * stride_bk, mask=mask_k, other=0.0)
    if ALONE:
        logits = product
        SPLITS = 0
    else:
        logits = tl.zeros((off_n.shape[0], off_k.shape[0]), tl.float32)
    mask = mask_n[:, None] & (off_k < row_width)[None, :]
    offset = off_n.to(tl.int64)[:, None] * stride_pn + off_k.to(tl.int64)[None, :] * stride_pk
    for start_s in range(0, SPLITS, BLOCK_S):
        off_s = start_s + tl.arange(0, BLOCK_S)
        pointer = partial + (off_s.to(tl.int64) * stride_ps)[:, None, None] + offset[None, :, :]
        mask_s = (off_s < SPLITS)[:, None, None] & mask[None, :, :]
        if WAITS:
            logits += tl.sum(awaited(seen(pointer, mask_s), pointer, mask_s, INTERPRETED), axis=0)
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
    best = tl.max((ordered.to(tl.int64) << 32) | (0x7FFFFFFF - off_k)[None, :].to(tl.int64), axis=1)
    ordered = (best >> 32).to(tl.int32)
    top = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return top, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def decide(
    product, partial, stride_ps, stride_pn, stride_pk,  # [SPLITS, N, row_width], of which K are logits
    bias, stride_bk,  # [K], or None
    temperature, threshold,  # float32
    probs,  # [N, K] float32, contiguous, or None
    label, confidence, exits,  # [N] int64, float32, bool, contiguous
    off_n, mask_n, K, row_width, SPLITS,
    ALONE: tl.constexpr, WAITS: tl.constexpr, INTERPRETED: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, ONE_BLOCK: tl.constexpr, CRITERION: tl.constexpr,
):  # fmt: skip
    """Decide about samples [BLOCK_N]: softmax, class, confidence, exit.

    One pass for the largest logit, its class and the sum of exponentials, a second one for the probabilities. Distances
    from the largest logit are divided by the temperature, not the logits, of which a division may make equals.
    """
    heat = tl.zeros((off_n.shape[0],), tl.float32) + temperature
    cold = tl.div_rn(1.0, heat)[:, None]
    top = tl.full((off_n.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((off_n.shape[0],), tl.float32)
    best = tl.zeros((off_n.shape[0],), tl.int32)
    exps = tl.zeros((off_n.shape[0], BLOCK_J), tl.float32)
    if CRITERION != MAX_PROB:
        state = tl.full((off_n.shape[0],), float("-inf") if CRITERION == MARGIN else 0.0, tl.float32)
    for start_k in range(0, K, BLOCK_J):
        off_j = start_k + tl.arange(0, BLOCK_J)
        logits = logits_block(
            product, partial, stride_ps, stride_pn, stride_pk, bias, stride_bk, off_n, mask_n, off_j, K, row_width,
            SPLITS, ALONE, WAITS, INTERPRETED, BLOCK_S,
        )  # fmt: skip
        logits = tl.where((off_j < K)[None, :], logits, float("-inf"))
        block_top, first = first_maximum(logits, off_j)
        new_top = tl.maximum(top, block_top)
        exps = heated_exp(logits, new_top, cold)
        best = tl.where(block_top > top, first, best)
        if CRITERION != MAX_PROB:
            decay = tl.sum(heated_exp(top[:, None], new_top, cold), axis=1)
            state = update_state(
                state, logits, exps, off_j, first, block_top, top, new_top, total, decay, cold, CRITERION
            )
        total = total * tl.sum(heated_exp(top[:, None], new_top, cold), axis=1) + tl.sum(exps, axis=1)
        top = new_top
        if probs is not None and not ONE_BLOCK:
            pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
            tl.store(pointer, logits, mask=mask_n[:, None] & (off_j < K)[None, :])
    sure = tl.where(top == float("-inf"), float("nan"), tl.div_rn(1.0, total))
    tl.store(label + off_n, best.to(tl.int64), mask=mask_n)
    if CRITERION == MAX_PROB:
        score = sure
    else:
        score = confidence_of(state, sure, top, total, heat, cold, K, CRITERION)
    tl.store(confidence + off_n, score, mask=mask_n)
    tl.store(exits + off_n, (score > threshold) & (heat > 0), mask=mask_n)
    if probs is not None:
        if not ONE_BLOCK:
            tl.debug_barrier()
        for start_k in range(0, K, BLOCK_J):
            off_j = start_k + tl.arange(0, BLOCK_J)
            mask = mask_n[:, None] & (off_j < K)[None, :]
            pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
            if not ONE_BLOCK:
                exps = heated_exp(tl.load(pointer, mask=mask, other=0.0), top, cold)
            tl.store(pointer, exps * sure[:, None], mask=mask)


@triton.jit
def draw_ticket(tickets, last):
    """Return the next piece of work that nobody has begun; ``tickets`` is 0 before, and after ticket ``last``."""
    ticket = tl.atomic_add(tickets, 1)
    # No branch: before one, ptxas 12.8 may leave the thread that drew behind the others of its warp, for good. What a
    # warp does as one is then done twice, such as counting the turns of a loop, of which half are missing.
    tl.store(tickets, 0, mask=ticket == last)
    return ticket


@triton.jit
def head_program(
    pid,
    x, stride_xn, stride_xc, stride_xh, stride_xw,  # [N, C, H, W]
    weight, stride_wk, stride_wf,  # [K, C * GRID_H * GRID_W]
    bias, stride_bk,  # [K], or None
    temperature, threshold,  # float32: numbers, or pointers to one
    probs, label, confidence, exits,  # see decide
    features,  # [WINDOW_PARTS, N, C * GRID_H * GRID_W] if tiled, else None
    partial,  # [SPLITS (BLOCK_S if tiled), N, K padded to a multiple of ROW_UNIT]
    arrived,  # [N] counters, or None if WAITS. It, and if WAITS the two above, are int32, 0 before and after
    N, C, H, W, K: tl.constexpr, GRID_H, GRID_W, WINDOW_H, WINDOW_W, SPLITS: tl.constexpr,
    POOL_MAX: tl.constexpr, ONE_WINDOW: tl.constexpr, INTERPRETED: tl.constexpr,
    TEMPERATURE_TENSOR: tl.constexpr, THRESHOLD_TENSOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
    ONE_BLOCK: tl.constexpr, WINDOW_PARTS: tl.constexpr, STAGES: tl.constexpr, ALONE: tl.constexpr,
    WAITS: tl.constexpr, WEIGHT_BUFFERS: tl.constexpr, CRITERION: tl.constexpr,
    RECTIFIES: tl.constexpr, NORMS: tl.constexpr,
    norm,  # if NORMS: weight [features] or None, its stride, bias [features] or None, its stride, eps; else None
    last,  # weight [CLASSES, K], its strides, bias or None, its stride, logits [N, CLASSES] float32; see below
    CLASSES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Do the work of program ``pid`` of a head; if tiled, those that pool come first, those that decide last.

    WAITS: partial sums and, if tiled, features are handed to programs that wait (``awaited``); otherwise the
    last program of a sample to arrive adds the sums up. ALONE: a sample has one program, which keeps its sum.
    With an ACTIVATION there is a ``last`` layer: what comes before it has K hidden features, all in one block, BLOCK_J,
    of the program that decides, which multiplies them; else it is None. NORMS wants a head that is tiled, one sample
    at a time. Numbers say what is there: the compiler cannot compare a tuple with None.
    Returns whether it decided about a sample, and which.
    """
    TILED: tl.constexpr = BLOCK_F > 1
    PARTS: tl.constexpr = rows_waited_for(WINDOW_PARTS, BLOCK_F, 0 if INTERPRETED else tl.extra.cuda.num_threads())
    POSITIONS = GRID_H * GRID_W
    F = C * POSITIONS
    row_width = tl.cdiv(K, ROW_UNIT) * ROW_UNIT
    # elements of a row that are sent: no more than a program that decides reads, and sets back to 0 if it waits
    sent = row_width if BLOCK_J >= ROW_UNIT else tl.cdiv(K, BLOCK_J) * BLOCK_J
    pools = True
    decides = False
    product = tl.zeros((1, BLOCK_J), tl.float32)
    # read before anything waits
    heat = tl.load(temperature) if TEMPERATURE_TENSOR else temperature
    limit = tl.load(threshold) if THRESHOLD_TENSOR else threshold
    if TILED:
        tiles = tl.cdiv(K, BLOCK_K) * BLOCK_S  # of a group of samples: each has a part of the features
        first_tile = N * SPLITS
        first_decision = first_tile + tl.cdiv(N, BLOCK_N) * tiles
        pools = pid < first_tile
        decides = pid >= first_decision
    pid_n = 0

    if pools:
        pid_n = pid // SPLITS
        pid_split = pid % SPLITS
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
        if not TILED:
            column = weight + (off_c.to(tl.int64) * POSITIONS + off_p) * stride_wf
            block = weight_block(column, stride_wk, mask_f, tl.arange(0, BLOCK_K), K)  # on its way while x is pooled
        pooled = pooled_features(
            x, stride_xn, stride_xc, stride_xh, stride_xw, pid_n, off_c, off_p, mask_f,
            pid_part * part_w, tl.minimum((pid_part + 1) * part_w, WINDOW_W),
            H, W, GRID_H, GRID_W, WINDOW_H, POOL_MAX, ONE_WINDOW, BLOCK_A, STAGES, RECTIFIES,
        )  # fmt: skip
        if TILED:
            feature = (tl.cast(pid_part, tl.int64) * N + pid_n) * F + off_c.to(tl.int64) * POSITIONS + off_p
            send(features + feature, pooled, mask_f)
        elif ALONE:  # the only program of the sample: its product is the sum
            product = tl.sum(block.to(tl.float32) * pooled, axis=1)[None, :]
            decides = pid >= 0
        else:
            row = partial + (tl.cast(pid_split, tl.int64) * N + pid_n) * row_width
            for start_k in range(0, sent, BLOCK_K):  # beyond K, too, if that is waited for
                off_k = start_k + tl.arange(0, BLOCK_K)
                following = weight_block(column, stride_wk, mask_f, off_k + BLOCK_K, K)
                product_k = tl.sum(block.to(tl.float32) * pooled, axis=1)
                if WAITS:
                    send(row + off_k, product_k, off_k < sent)
                else:
                    tl.store(row + off_k, product_k, mask=off_k < sent)
                block = following
            if WAITS:
                decides = pid_split == SPLITS - 1
            else:
                tl.debug_barrier()  # puts every thread's stores before the one thread's arrival
                decides = tl.atomic_add(arrived + pid_n, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
                if decides:
                    tl.store(arrived + pid_n, 0)
    elif TILED:
        if decides:
            pid_n = pid - first_decision
        else:
            pid_tile = pid - first_tile
            pid_group = pid_tile // tiles
            off_n = pid_group * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = off_n < N
            pid_s = pid_tile % BLOCK_S
            off_k = pid_tile % tiles // BLOCK_S * BLOCK_K + tl.arange(0, BLOCK_K)
            share = tl.cdiv(tl.cdiv(F, BLOCK_F), BLOCK_S) * BLOCK_F
            first_f = pid_s * share
            last_f = tl.minimum(first_f + share, F)
            off_f = first_f + tl.arange(0, BLOCK_F)
            column = weight + off_f.to(tl.int64) * stride_wf
            if WEIGHT_BUFFERS == 0:
                right = weight_block(column, stride_wk, off_f < last_f, off_k, K)  # on its way while others pool
            if NORMS:
                norm_weight, stride_nw, norm_bias, stride_nb, eps = norm
                mean, scale = norm_statistics(
                    features, pid_group, N, F, eps, BLOCK_F, WINDOW_PARTS, PARTS, INTERPRETED
                )  # fmt: skip
            tile = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            part_size = tl.cast(N, tl.int64) * F
            first_part = features + (off_n.to(tl.int64) * F)[:, None]
            if BLOCK_N > 1:
                mask = mask_n[:, None] & (off_f < last_f)[None, :]
                read = seen(first_part + off_f[None, :], mask)
                other = read
                if WINDOW_PARTS > 1:
                    other = seen(first_part + off_f[None, :] + part_size, mask)
            if WEIGHT_BUFFERS > 0:
                # Triton reads the weight of the first steps, if in vectors, before the loop waits for features
                for start_f in tl.range(first_f, last_f, BLOCK_F, num_stages=WEIGHT_BUFFERS):
                    off_f = start_f + tl.arange(0, BLOCK_F)
                    block = weight_block(column, stride_wk, off_f < last_f, off_k, K)
                    mask = mask_n[:, None] & (off_f < last_f)[None, :]
                    pointer = first_part + off_f[None, :]
                    left = group_features(read, other, pointer, part_size, mask, WINDOW_PARTS, INTERPRETED)
                    mask = mask_n[:, None] & (off_f + BLOCK_F < last_f)[None, :]
                    read = seen(pointer + BLOCK_F, mask)
                    if WINDOW_PARTS > 1:
                        other = seen(pointer + BLOCK_F + part_size, mask)
                    else:
                        other = read
                    tile = group_product(left, block, tile, INTERPRETED)
                    column += tl.cast(BLOCK_F, tl.int64) * stride_wf
            else:
                for start_f in range(first_f, last_f, BLOCK_F):
                    off_f = start_f + tl.arange(0, BLOCK_F)
                    if BLOCK_N == 1:
                        left = sample_features(
                            features, pid_group, off_f, last_f, N, F, WINDOW_PARTS, PARTS, INTERPRETED
                        )  # fmt: skip
                        if NORMS:
                            left = normed(
                                left, mean, scale, norm_weight, stride_nw, norm_bias, stride_nb, off_f, last_f
                            )  # fmt: skip
                        tile += tl.sum(right.to(tl.float32) * left[None, :], axis=1)[None, :]
                    else:
                        mask = mask_n[:, None] & (off_f < last_f)[None, :]
                        pointer = first_part + off_f[None, :]
                        left = group_features(read, other, pointer, part_size, mask, WINDOW_PARTS, INTERPRETED)
                        # those of the next step are on their way while these are multiplied
                        following = first_part + (off_f + BLOCK_F)[None, :]
                        mask = mask_n[:, None] & (off_f + BLOCK_F < last_f)[None, :]
                        read = seen(following, mask)
                        other = read
                        if WINDOW_PARTS > 1:
                            other = seen(following + part_size, mask)
                        tile = group_product(left, right, tile, INTERPRETED)
                    column += tl.cast(BLOCK_F, tl.int64) * stride_wf
                    right = weight_block(column, stride_wk, off_f + BLOCK_F < last_f, off_k, K)
            row = tl.cast(pid_s, tl.int64) * N + off_n.to(tl.int64)
            pointer = partial + row[:, None] * row_width + off_k[None, :]
            send(pointer, tile, mask_n[:, None] & (off_k < sent)[None, :])

    if decides:
        off_n = pid_n + tl.arange(0, 1)
        if ACTIVATION == NO_ACTIVATION:
            decide(
                product, partial, tl.cast(N, tl.int64) * row_width, row_width, 1, bias, stride_bk, heat, limit,
                probs, label, confidence, exits, off_n, off_n < N, K, row_width, BLOCK_S if TILED else SPLITS,
                ALONE, WAITS, INTERPRETED, BLOCK_S, BLOCK_J, ONE_BLOCK, CRITERION,
            )  # fmt: skip
        else:
            last_weight, stride_lk, stride_lh, last_bias, stride_lb, logits = last
            BLOCK_L: tl.constexpr = classes_at_once(CLASSES, BLOCK_J)
            off_h = tl.arange(0, BLOCK_J)
            off_l = tl.arange(0, BLOCK_L)
            last_column = last_weight + off_h.to(tl.int64) * stride_lh
            rows = weight_block(last_column, stride_lk, off_h < K, off_l, CLASSES)  # on its way while sums are
            hidden = logits_block(
                product, partial, tl.cast(N, tl.int64) * row_width, row_width, 1, bias, stride_bk, off_n, off_n < N,
                off_h, K, row_width, BLOCK_S if TILED else SPLITS, ALONE, WAITS, INTERPRETED, BLOCK_S,
            )  # fmt: skip
            hidden = tl.where((off_h < K)[None, :], activated(hidden, ACTIVATION), 0.0)
            if BLOCK_L >= CLASSES:
                decide(
                    tl.sum(rows.to(tl.float32) * hidden, axis=1)[None, :], partial, 0, 0, 1, last_bias, stride_lb,
                    heat, limit, probs, label, confidence, exits, off_n, off_n < N, CLASSES, CLASSES, 1,
                    True, False, INTERPRETED, 1, BLOCK_L, True, CRITERION,
                )  # fmt: skip
            else:
                logits_row = logits + tl.cast(pid_n, tl.int64) * CLASSES
                for start_l in range(0, CLASSES, BLOCK_L):
                    off_l = start_l + tl.arange(0, BLOCK_L)
                    following = weight_block(last_column, stride_lk, off_h < K, off_l + BLOCK_L, CLASSES)
                    tl.store(logits_row + off_l, tl.sum(rows.to(tl.float32) * hidden, axis=1), mask=off_l < CLASSES)
                    rows = following
                tl.debug_barrier()  # threads read what others stored
                BLOCK_D: tl.constexpr = softmax_block(CLASSES)
                decide(
                    tl.zeros((1, BLOCK_D), tl.float32), logits, 0, CLASSES, 1, last_bias, stride_lb, heat, limit,
                    probs, label, confidence, exits, off_n, off_n < N, CLASSES, CLASSES, 1,
                    False, False, INTERPRETED, 1, BLOCK_D, BLOCK_D >= CLASSES, CRITERION,
                )  # fmt: skip
        if TILED:  # all tiles have taken the features, since their products are here
            for start_f in range(0, F, BLOCK_F):
                off_f = start_f + tl.arange(0, BLOCK_F)
                for part in range(0, WINDOW_PARTS):
                    row = features + (tl.cast(part, tl.int64) * N + pid_n) * F
                    tl.store(row + off_f, tl.zeros((BLOCK_F,), tl.int32), mask=off_f < F)
    return decides, pid_n
