"""Pool: a block of features of one sample from its map, each over one window of a grid, whose position is ``off_p``."""

import triton
import triton.language as tl

from .hidden_layers import rectified


@triton.jit
def window_bounds(off, SIZE, GRID):
    """Return start and end (exclusive) of window ``off`` of GRID over SIZE elements, as torch.nn.AdaptiveAvgPool2d."""
    scaled = off.to(tl.int64) * SIZE
    return (scaled // GRID).to(tl.int32), ((scaled + SIZE + GRID - 1) // GRID).to(tl.int32)


@triton.jit
def pooled_block(pid_split, sizes, CONFIG: tl.constexpr):
    """Return what program ``pid_split`` of a sample pools: channels and positions [BLOCK] and which of them exist.

    Before them stand which part of the windows, and how many columns of one a part has.
    """
    C, _, _, GRID_H, GRID_W, _, WINDOW_W = sizes
    pid_part = pid_split % CONFIG.window_parts
    pid_block = pid_split // CONFIG.window_parts
    part_w = tl.cdiv(tl.cdiv(WINDOW_W, CONFIG.block_a), CONFIG.window_parts) * CONFIG.block_a
    positions = GRID_H * GRID_W
    off_f = tl.arange(0, CONFIG.block_c * CONFIG.block_p)
    blocks_p = tl.cdiv(positions, CONFIG.block_p)
    if CONFIG.one_window:
        off_c = pid_block * CONFIG.block_c + off_f
        off_p = tl.zeros_like(off_f)
    else:
        off_c = pid_block // blocks_p * CONFIG.block_c + off_f // CONFIG.block_p
        off_p = pid_block % blocks_p * CONFIG.block_p + off_f % CONFIG.block_p
    return pid_part, part_w, off_c, off_p, (off_c < C) & (off_p < positions)


@triton.jit
def pooled_features(x, pid_n, block, sizes, CONFIG: tl.constexpr):
    """Pool a block of features of sample ``pid_n``, of its ReLU if the head rectifies, to float32; 0 where masked.

    Of each window only the columns of a part are read; an average is their share of it.
    """
    x, stride_xn, stride_xc, stride_xh, stride_xw = x
    _, H, W, GRID_H, GRID_W, WINDOW_H, WINDOW_W = sizes
    pid_part, part_w, off_c, off_p, mask_f = block
    start_w_part = pid_part * part_w
    end_w_part = tl.minimum((pid_part + 1) * part_w, WINDOW_W)
    BLOCK_A: tl.constexpr = CONFIG.block_a
    if CONFIG.one_window:  # plain sizes instead of vectors of bounds: the compiler then sees contiguous reads
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
    if not CONFIG.one_window:
        base += start_h.to(tl.int64) * stride_xh + start_w.to(tl.int64) * stride_xw
    nothing: tl.constexpr = float("-inf") if CONFIG.pool_max else 0.0
    acc = tl.full((off_c.shape[0], BLOCK_A), nothing, tl.float32)
    acc_nan = tl.zeros((off_c.shape[0], BLOCK_A), tl.int32)
    for off_h in range(0, WINDOW_H):
        for start_a in tl.range(start_w_part, end_w_part, BLOCK_A, num_stages=CONFIG.stages):
            off_a = start_a + tl.arange(0, BLOCK_A)
            if CONFIG.one_window:
                mask_a = mask_f[:, None] & (off_a < end_w_part)[None, :]
            else:
                mask_a = mask_f[:, None] & (off_h < size_h)[:, None] & (off_a[None, :] < size_w[:, None])
            offset = tl.cast(off_h, tl.int64) * stride_xh + off_a.to(tl.int64) * stride_xw
            value = tl.load(base[:, None] + offset[None, :], mask=mask_a, other=nothing).to(tl.float32)
            if CONFIG.pool_max:
                acc = tl.maximum(acc, value)
                acc_nan |= (value != value).to(tl.int32)  # a maximum on the GPU drops NaN; PyTorch's keeps it
            else:
                acc += rectified(value) if CONFIG.rectifies else value
    if CONFIG.pool_max:
        pooled = tl.where(tl.max(acc_nan, axis=1) != 0, float("nan"), tl.max(acc, axis=1))
        if CONFIG.rectifies:
            pooled = rectified(pooled)
    elif CONFIG.one_window:  # one division instead of one for each feature that a thread has
        pooled = tl.sum(acc, axis=1) * tl.div_rn(1.0, tl.zeros((), tl.float32) + H * W)
    else:
        area = tl.maximum(size_h * size_w, 1).to(tl.float32)
        pooled = tl.div_rn(tl.sum(acc, axis=1), area)
    return tl.where(mask_f, pooled, 0.0)
