"""The stages of a fused head, shared by the operator's kernel and the runners'.

    feature[n, f] = pool of x[n, c] over window (i, j),    f = (c * GRID_H + i) * GRID_W + j
    logit[n, k]   = sum_f feature[n, f] * weight[k, f] + bias[k]
    probs[n]      = softmax(logit[n] / temperature)
    exit[n]       = max_k probs[n, k] > threshold

Two ways lead to the logits, and the configuration chooses:

*   split: each program pools a block of features of one sample and multiplies it with its columns of the weight. The
    partial logits go to a workspace; the program of a sample that arrives last adds them up in a fixed order.
*   tiled, for batches: the first programs pool; the next ones wait until a group of samples is pooled and multiply it
    with some rows of the weight, on tensor cores; the last ones wait for the logits of a sample. The number of a
    program is a ticket that it draws (``draw_ticket``), so that nothing waits for a program that has not started.

Either way one program then decides about a sample: softmax, class, confidence, exit. Sums are float32 and their order
is fixed, so that results repeat bit for bit. Prefixes: ``pid_`` program, ``off_`` index along a dimension, ``mask_``
what of it exists, ``acc_`` float32 accumulator.
"""

import triton
import triton.language as tl

#: Triton's interpreter runs the kernels on CPU tensors (TRITON_INTERPRET=1 when this module was imported).
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def window_bounds(off, SIZE, GRID):
    """Window ``off`` of GRID over SIZE elements, as torch.nn.AdaptiveAvgPool2d cuts it: [start, end)."""
    scaled = off.to(tl.int64) * SIZE
    return (scaled // GRID).to(tl.int32), ((scaled + SIZE + GRID - 1) // GRID).to(tl.int32)


@triton.jit
def pooled_features(
    x, stride_xn, stride_xc, stride_xh, stride_xw,  # [N, C, H, W]
    pid_n, off_c, off_p, mask_f, start_w_part, end_w_part,
    H, W, GRID_H, GRID_W, WINDOW_H,
    POOL_MAX: tl.constexpr, ONE_WINDOW: tl.constexpr, BLOCK_A: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Pool features [BLOCK_F] of sample ``pid_n`` to float32; 0 where masked.

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
            if POOL_MAX:
                acc = tl.maximum(acc, value)
                acc_nan |= (value != value).to(tl.int32)  # a maximum on the GPU drops NaN; PyTorch's keeps it
            else:
                acc += value
    if POOL_MAX:
        pooled = tl.where(tl.max(acc_nan, axis=1) != 0, float("nan"), tl.max(acc, axis=1))
    else:
        area = tl.maximum(size_h * size_w, 1).to(tl.float32)
        pooled = tl.div_rn(tl.sum(acc, axis=1), area)
    return tl.where(mask_f, pooled, 0.0)


@triton.jit
def logits_block(
    partial, stride_ps, stride_pn, stride_pk,  # [SPLITS, N, K]
    bias, stride_bk, off_n, mask_n, off_k, K, SPLITS, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add up partial logits of samples [BLOCK_N] and classes [BLOCK_J], in the order of the splits."""
    mask_k = off_k < K
    mask = mask_n[:, None] & mask_k[None, :]
    offset = off_n.to(tl.int64)[:, None] * stride_pn + off_k.to(tl.int64)[None, :] * stride_pk
    logits = tl.zeros((off_n.shape[0], off_k.shape[0]), tl.float32)
    for start_s in range(0, SPLITS, BLOCK_S):
        off_s = start_s + tl.arange(0, BLOCK_S)
        pointer = partial + (off_s.to(tl.int64) * stride_ps)[:, None, None] + offset[None, :, :]
        # .cg: other SMs wrote them, and this SM's L1 may hold older lines
        block = tl.load(
            pointer, mask=(off_s < SPLITS)[:, None, None] & mask[None, :, :], other=0.0, cache_modifier=".cg"
        )
        logits += tl.sum(block.to(tl.float32), axis=0)
    if bias is not None:
        logits += tl.load(bias + off_k.to(tl.int64) * stride_bk, mask=mask_k, other=0.0).to(tl.float32)[None, :]
    return logits


@triton.jit
def shifted_exp(scaled, top):
    """exp(scaled - top), with 0 for a class at -inf even while no larger one was seen."""
    return tl.exp(scaled - tl.where(top == float("-inf"), 0.0, top)[:, None])


@triton.jit
def decide(
    partial, stride_ps, stride_pn, stride_pk,  # [SPLITS, N, K]
    bias, stride_bk,  # [K], or None
    temperature, threshold,  # float32
    probs,  # [N, K] float32, contiguous, or None
    label, confidence, exits,  # [N] int64, float32, bool, contiguous
    off_n, mask_n, K, SPLITS,
    BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Decide about samples [BLOCK_N]: softmax, class, confidence, exit.

    One pass for the largest logit, its class and the sum of exponentials, a second one for the probabilities. The class
    is that of the largest logit before the temperature, whose division may make equals of them.
    """
    heat = tl.zeros((off_n.shape[0],), tl.float32) + temperature
    top = tl.full((off_n.shape[0],), float("-inf"), tl.float32)
    total = tl.zeros((off_n.shape[0],), tl.float32)
    top_logit = top
    best = tl.zeros((off_n.shape[0],), tl.int32)
    exps = tl.zeros((off_n.shape[0], BLOCK_J), tl.float32)
    for start_k in range(0, K, BLOCK_J):
        off_j = start_k + tl.arange(0, BLOCK_J)
        logits = logits_block(
            partial, stride_ps, stride_pn, stride_pk, bias, stride_bk, off_n, mask_n, off_j, K, SPLITS, BLOCK_S
        )
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
        if probs is not None and not ONE_BLOCK:
            pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
            tl.store(pointer, scaled, mask=mask_n[:, None] & (off_j < K)[None, :])
    sure = tl.where(top == float("-inf"), float("nan"), tl.div_rn(1.0, total))
    tl.store(label + off_n, best.to(tl.int64), mask=mask_n)
    tl.store(confidence + off_n, sure, mask=mask_n)
    tl.store(exits + off_n, (sure > threshold) & (heat > 0), mask=mask_n)
    if probs is not None:
        if not ONE_BLOCK:
            tl.debug_barrier()
        for start_k in range(0, K, BLOCK_J):
            off_j = start_k + tl.arange(0, BLOCK_J)
            mask = mask_n[:, None] & (off_j < K)[None, :]
            pointer = probs + off_n.to(tl.int64)[:, None] * K + off_j[None, :]
            if not ONE_BLOCK:
                exps = shifted_exp(tl.load(pointer, mask=mask, other=0.0), top)
            tl.store(pointer, tl.div_rn(exps, total[:, None]), mask=mask)


@triton.jit
def wait_for(counter, expected):
    """Wait until ``counter`` has reached ``expected``; what was written before is then visible."""
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < expected:
        pass
    tl.debug_barrier()


@triton.jit
def draw_ticket(tickets):
    """Number the programs in the order in which they start; ``tickets`` is 0 before and after."""
    ticket = tl.atomic_add(tickets, 1)
    if ticket == tl.num_programs(0) - 1:
        tl.store(tickets, 0)  # all are drawn
    return ticket


@triton.jit
def head_program(
    pid,
    x, stride_xn, stride_xc, stride_xh, stride_xw,  # [N, C, H, W]
    weight, stride_wk, stride_wf,  # [K, C * GRID_H * GRID_W]
    bias, stride_bk,  # [K], or None
    temperature, threshold,  # float32: numbers, or pointers to one
    probs, label, confidence, exits,  # see decide
    features,  # [WINDOW_PARTS, N, C * GRID_H * GRID_W] float32 if tiled, else None
    partial,  # [SPLITS (1 if tiled), N, K] float32
    arrived,  # counters, 0 before and after: [N], or if tiled [groups] of each of three stages
    N, C, H, W, K, GRID_H, GRID_W, WINDOW_H, WINDOW_W, SPLITS,
    POOL_MAX: tl.constexpr, ONE_WINDOW: tl.constexpr, DOT_FLOAT32: tl.constexpr,
    TEMPERATURE_TENSOR: tl.constexpr, THRESHOLD_TENSOR: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_A: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
    ONE_BLOCK: tl.constexpr, WINDOW_PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Do the work of program ``pid`` of a head; if tiled, those that pool come first, those that decide last.

    Returns whether it decided about a sample, and which.
    """
    TILED: tl.constexpr = BLOCK_N > 1
    POSITIONS = GRID_H * GRID_W
    F = C * POSITIONS
    pools = True
    decides = False
    # read before anything waits
    heat = tl.load(temperature) if TEMPERATURE_TENSOR else temperature
    limit = tl.load(threshold) if THRESHOLD_TENSOR else threshold
    if TILED:
        groups = tl.cdiv(N, BLOCK_N)
        tiles = tl.cdiv(K, BLOCK_K)
        pooled_programs = arrived
        multiplied_tiles = arrived + groups
        decided_samples = arrived + 2 * groups
        first_tile = N * SPLITS
        first_decision = first_tile + groups * tiles
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
        pooled = pooled_features(
            x, stride_xn, stride_xc, stride_xh, stride_xw, pid_n, off_c, off_p, mask_f,
            pid_part * part_w, tl.minimum((pid_part + 1) * part_w, WINDOW_W),
            H, W, GRID_H, GRID_W, WINDOW_H, POOL_MAX, ONE_WINDOW, BLOCK_A, STAGES,
        )  # fmt: skip
        if TILED:
            feature = off_c.to(tl.int64) * POSITIONS + off_p
            tl.store(features + (tl.cast(pid_part, tl.int64) * N + pid_n) * F + feature, pooled, mask=mask_f)
            # a barrier puts every thread's stores before the one thread's arrival, here and below
            tl.debug_barrier()
            tl.atomic_add(pooled_programs + pid_n // BLOCK_N, 1, sem="release", scope="gpu")
        else:
            column = weight + (off_c.to(tl.int64) * POSITIONS + off_p) * stride_wf
            row = partial + (tl.cast(pid_split, tl.int64) * N + pid_n) * K
            for start_k in range(0, K, BLOCK_K):
                off_k = start_k + tl.arange(0, BLOCK_K)
                mask_k = off_k < K
                pointer = column[None, :] + (off_k.to(tl.int64) * stride_wk)[:, None]  # [BLOCK_K, BLOCK_C * BLOCK_P]
                block = tl.load(pointer, mask=mask_k[:, None] & mask_f[None, :], other=0.0)
                tl.store(row + off_k, tl.sum(block.to(tl.float32) * pooled, axis=1), mask=mask_k)
            tl.debug_barrier()
            decides = tl.atomic_add(arrived + pid_n, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
            if decides:
                tl.store(arrived + pid_n, 0)
    elif TILED:
        if decides:
            pid_n = pid - first_decision
            pid_group = pid_n // BLOCK_N
            wait_for(multiplied_tiles + pid_group, tiles)
            members = tl.minimum(N - pid_group * BLOCK_N, BLOCK_N)
            if tl.atomic_add(decided_samples + pid_group, 1) == members - 1:  # nobody waits here any more
                tl.store(pooled_programs + pid_group, 0)
                tl.store(multiplied_tiles + pid_group, 0)
                tl.store(decided_samples + pid_group, 0)
        else:
            pid_tile = pid - first_tile
            pid_group = pid_tile // tiles
            off_n = pid_group * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = off_n < N
            off_k = pid_tile % tiles * BLOCK_K + tl.arange(0, BLOCK_K)
            mask_k = off_k < K
            members = tl.minimum(N - pid_group * BLOCK_N, BLOCK_N)
            wait_for(pooled_programs + pid_group, members * SPLITS)
            product = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
            for start_f in range(0, F, BLOCK_F):
                off_f = start_f + tl.arange(0, BLOCK_F)
                mask_f = off_f < F
                left = tl.zeros((BLOCK_N, BLOCK_F), tl.float32)
                for part in range(0, WINDOW_PARTS):
                    row = (tl.cast(part, tl.int64) * N + off_n) * F
                    pointer = features + row[:, None] + off_f[None, :]
                    left += tl.load(pointer, mask=mask_n[:, None] & mask_f[None, :], other=0.0, cache_modifier=".cg")
                right = tl.load(
                    weight + (off_k.to(tl.int64) * stride_wk)[:, None] + (off_f.to(tl.int64) * stride_wf)[None, :],
                    mask=mask_k[:, None] & mask_f[None, :], other=0.0,
                )  # fmt: skip
                if DOT_FLOAT32:  # the interpreter multiplies bfloat16 wrongly
                    right = right.to(tl.float32)
                product = tl.dot(left.to(right.dtype), tl.trans(right), product, input_precision="ieee")
            pointer = partial + off_n.to(tl.int64)[:, None] * K + off_k[None, :]
            tl.store(pointer, product, mask=mask_n[:, None] & mask_k[None, :])
            tl.debug_barrier()
            tl.atomic_add(multiplied_tiles + pid_group, 1, sem="release", scope="gpu")

    if decides:
        off_n = pid_n + tl.arange(0, 1)
        decide(
            partial, tl.cast(N, tl.int64) * K, K, 1, bias, stride_bk, heat, limit,
            probs, label, confidence, exits, off_n, off_n < N, K, 1 if TILED else SPLITS,
            BLOCK_S, BLOCK_J, ONE_BLOCK,
        )  # fmt: skip
    return decides, pid_n
