"""Pool: a block of features of one sample from its map, each over one window of a grid, whose position is ``off_p``."""

import triton
import triton.language as tl

from .hidden_layers import rectified


@triton.jit
def known_multiple(number, UNIT: tl.constexpr):
    """Return a multiple of UNIT, so written that Triton sees that, and reads in vectors; of 16 it sees anyway."""
    return number if UNIT == 16 else number // UNIT * UNIT


@triton.jit
def feature_count(sizes):
    """Return how many features a sample has: a channel has one for each position of the grid."""
    C, _, _, GRID_H, GRID_W, _, _ = sizes
    return C * (GRID_H * GRID_W)


@triton.jit
def window_bounds(off, SIZE, GRID):
    """Return start and end (exclusive) of window ``off`` of GRID over SIZE elements, as torch.nn.AdaptiveAvgPool2d.

    That is floor(off * SIZE / GRID) and ceil((off + 1) * SIZE / GRID), but no product is above GRID * GRID, which int32
    holds (``MOST_WINDOWS``): divisions of int64 take longer than a small head.
    """
    whole = SIZE // GRID
    rest = SIZE % GRID
    return off * whole + off * rest // GRID, (off + 1) * whole + tl.cdiv((off + 1) * rest, GRID)


@triton.jit
def pooled_block(pid_split, sizes, CONFIG: tl.constexpr):
    """Return what program ``pid_split`` of a sample pools: channels and positions [BLOCK] and which of them exist.

    Before them stand which part of the windows, and how many columns of one a part has.
    """
    C, _, _, GRID_H, GRID_W, _, WINDOW_W = sizes
    if CONFIG.channels_last:
        C = known_multiple(C, CONFIG.map_unit)
    elif CONFIG.one_window:
        C = known_multiple(C, CONFIG.unit)
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
        off_c = pid_block // blocks_p * CONFIG.block_c
        off_p = pid_block % blocks_p * CONFIG.block_p
        if CONFIG.channels_last:  # neighbours in memory are neighbours in the block
            off_c += off_f % CONFIG.block_c
            off_p += off_f // CONFIG.block_c
        else:
            off_c += off_f // CONFIG.block_p
            off_p += off_f % CONFIG.block_p
    return pid_part, part_w, off_c, off_p, (off_c < C) & (off_p < positions)


@triton.jit
def pooled_features(x, pid_n, block, sizes, CONFIG: tl.constexpr):
    """Pool a block of features of sample ``pid_n``, of its ReLU if the head rectifies, to float32; 0 where masked.

    Of each window only a part is read; an average is their share of it.
    """
    if CONFIG.one_window:
        pooled = pooled_channels(x, pid_n, block, sizes, CONFIG)
    else:
        pooled = pooled_windows(x, pid_n, block, sizes, CONFIG)
    return tl.where(block[4], pooled, 0.0)


@triton.jit
def pooled_channels(x, pid_n, block, sizes, CONFIG: tl.constexpr):
    """Pool whole channels. Plain sizes instead of vectors of bounds: the compiler then sees contiguous reads."""
    x, stride_xn, stride_xc, stride_xh, stride_xw = in_known_steps(x, CONFIG)
    _, H, W, _, _, WINDOW_H, WINDOW_W = sizes
    pid_part, part_w, off_c, _, mask_f = block
    start_w = pid_part * part_w
    end_w = tl.minimum((pid_part + 1) * part_w, WINDOW_W)
    BLOCK_A: tl.constexpr = CONFIG.block_a
    if not CONFIG.channels_last:
        end_w = end_w // CONFIG.map_unit * CONFIG.map_unit
    base = x + tl.cast(pid_n, tl.int64) * stride_xn + off_c.to(tl.int64) * stride_xc
    acc = tl.full((off_c.shape[0], BLOCK_A), float("-inf") if CONFIG.pool_max else 0.0, tl.float32)
    for off_h in range(0, WINDOW_H):
        for start_a in tl.range(start_w, end_w, BLOCK_A, num_stages=CONFIG.stages):
            off_a = start_a + tl.arange(0, BLOCK_A)
            mask_a = mask_f[:, None] & (off_a < end_w)[None, :]
            offset = tl.cast(off_h, tl.int64) * stride_xh + off_a.to(tl.int64) * stride_xw
            acc = pooled_with(acc, base[:, None] + offset[None, :], mask_a, CONFIG)
    if CONFIG.pool_max:
        return largest(acc, CONFIG)
    else:  # one division instead of one for each feature that a thread has
        return tl.sum(acc, axis=1) * tl.div_rn(1.0, tl.zeros((), tl.float32) + H * W)


@triton.jit
def pooled_windows(x, pid_n, block, sizes, CONFIG: tl.constexpr):
    """Pool windows of a grid, the elements of each in the order of its rows, as many at a time as there may be."""
    x, stride_xn, stride_xc, stride_xh, stride_xw = in_known_steps(x, CONFIG)
    _, H, W, GRID_H, GRID_W, WINDOW_H, WINDOW_W = sizes
    pid_part, _, off_c, off_p, mask_f = block
    BLOCK_A: tl.constexpr = CONFIG.block_a
    part = tl.cdiv(tl.cdiv(WINDOW_H * WINDOW_W, BLOCK_A), CONFIG.window_parts) * BLOCK_A
    start_h, end_h = window_bounds(off_p // GRID_W, H, GRID_H)
    start_w, end_w = window_bounds(off_p % GRID_W, W, GRID_W)
    size_h = end_h - start_h
    size_w = end_w - start_w
    base = x + tl.cast(pid_n, tl.int64) * stride_xn + off_c.to(tl.int64) * stride_xc
    base += start_h.to(tl.int64) * stride_xh + start_w.to(tl.int64) * stride_xw
    acc = tl.full((off_c.shape[0], BLOCK_A), float("-inf") if CONFIG.pool_max else 0.0, tl.float32)
    end_a = tl.minimum((pid_part + 1) * part, WINDOW_H * WINDOW_W)
    for start_a in tl.range(pid_part * part, end_a, BLOCK_A, num_stages=CONFIG.stages):
        off_a = start_a + tl.arange(0, BLOCK_A)
        off_h = off_a // WINDOW_W
        off_w = off_a % WINDOW_W
        mask_a = mask_f[:, None] & (off_h[None, :] < size_h[:, None]) & (off_w[None, :] < size_w[:, None])
        offset = off_h.to(tl.int64) * stride_xh + off_w.to(tl.int64) * stride_xw
        acc = pooled_with(acc, base[:, None] + offset[None, :], mask_a, CONFIG)
    if CONFIG.pool_max:
        return largest(acc, CONFIG)
    else:
        return tl.div_rn(tl.sum(acc, axis=1), tl.maximum(size_h * size_w, 1).to(tl.float32))


@triton.jit
def in_known_steps(x, CONFIG: tl.constexpr):
    """Return an input's address and strides, those that are multiples of ``map_unit`` as such."""
    x, stride_xn, stride_xc, stride_xh, stride_xw = x
    stride_xn = known_multiple(stride_xn, CONFIG.map_unit)
    stride_xh = known_multiple(stride_xh, CONFIG.map_unit)
    if CONFIG.channels_last:
        stride_xw = known_multiple(stride_xw, CONFIG.map_unit)
    else:
        stride_xc = known_multiple(stride_xc, CONFIG.map_unit)
    return x, stride_xn, stride_xc, stride_xh, stride_xw


@triton.jit
def pooled_with(acc, pointer, mask, CONFIG: tl.constexpr):
    """Add elements [features, block_a] of windows, or take the larger ones."""
    value = tl.load(pointer, mask=mask, other=float("-inf") if CONFIG.pool_max else 0.0).to(tl.float32)
    if CONFIG.pool_max:
        return larger(acc, value)
    else:
        return acc + (rectified(value) if CONFIG.rectifies else value)


@triton.jit
def larger(one, other):
    """Return the larger of two numbers; NaN if one is, as in PyTorch."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(acc, CONFIG: tl.constexpr):
    """Return the largest element of each window, or its ReLU; NaN if one is."""
    pooled = tl.reduce(acc, 1, larger)
    return rectified(pooled) if CONFIG.rectifies else pooled
