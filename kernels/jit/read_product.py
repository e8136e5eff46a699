"""Product of features that lie in memory: in x itself, of which nothing is pooled, or packed by a launch before.

    sum[k, n] = sum_f weight[k, f] * feature[n, f]

A tile has ``block_k`` rows of the weight by ``block_n`` samples, on tensor cores, of float32 in three products of its
upper and lower halves, as exact as float32. Steps lie in shared memory ahead of it; a group reads the weight once.
"""

import triton
import triton.language as tl

from .hand_over import awaited, dot, seen, send
from .hidden_layers import rectified
from .norm import norm_statistics, normed, position_offsets
from .pool import feature_count, known_multiple


@triton.jit
def read_product(pid_tile, x, weight, norm, statistics, sizes, N, CONFIG: tl.constexpr):
    """Multiply features in ``x`` by rows of the weight; returns sums, samples, and which rows, which share."""
    # sums are [block_k, block_n] here, [block_n, block_k] in product.py
    weight, stride_wk, stride_wf = weight
    groups = tl.cdiv(N, CONFIG.block_n)  # side by side, so that they find the weight in the cache
    off_n = pid_tile % groups * CONFIG.block_n + tl.arange(0, CONFIG.block_n)
    pid_k = pid_tile // groups // CONFIG.block_s
    off_k = pid_k * CONFIG.block_k + tl.arange(0, CONFIG.block_k)
    pid_s = pid_tile // groups % CONFIG.block_s
    mask_n = off_n < N
    steps = step_count(sizes, CONFIG)
    share = tl.cdiv(steps, CONFIG.block_s)
    if CONFIG.norms:
        statistics += off_n
        mean = awaited(seen(statistics, mask_n), statistics, mask_n)
        scale = awaited(seen(statistics + N, mask_n), statistics + N, mask_n)
        # Who decides clears them as soon as all sums are there, and a share without steps sends its own at once.
        tl.debug_barrier()
    row = weight + off_k.to(tl.int64)[:, None] * known_multiple(stride_wk, CONFIG.unit)
    tile = tl.full((CONFIG.block_k, CONFIG.block_n), 0.0, tl.float32)
    for step in tl.range(pid_s * share, tl.minimum(pid_s * share + share, steps), num_stages=CONFIG.weight_buffers):
        off_f, mask_f = step_features(step, sizes, CONFIG)
        mask = (off_k < CONFIG.rows)[:, None] & mask_f[None, :]
        left = tl.load(row + (off_f * stride_wf)[None, :], mask=mask, other=0.0)
        right = feature_block(x, step, off_f, mask_f, off_n, sizes, N, CONFIG)
        if CONFIG.norms:
            right = normed(right, mean[:, None], scale[:, None], norm, off_f, mask_f).to(left.dtype)
        tile = dot(left, tl.trans(right), tile, "tf32x3")
    return tile, off_n, pid_k, pid_s


@triton.jit
def step_count(sizes, CONFIG: tl.constexpr):
    """Return in how many steps the features of a sample are read."""
    C, _, _, GRID_H, GRID_W, _, _ = sizes
    if CONFIG.one_window:
        return tl.cdiv(feature_count(sizes), CONFIG.block_f)
    else:
        return tl.cdiv(C, CONFIG.block_c) * tl.cdiv(GRID_H * GRID_W, CONFIG.block_p)


@triton.jit
def step_blocks(step, sizes, CONFIG: tl.constexpr):
    """Return the channels [block_c] and positions [block_p] of a step."""
    _, _, _, GRID_H, GRID_W, _, _ = sizes
    blocks_p = tl.cdiv(GRID_H * GRID_W, CONFIG.block_p)
    off_c = step // blocks_p * CONFIG.block_c + tl.arange(0, CONFIG.block_c)
    off_p = step % blocks_p * CONFIG.block_p + tl.arange(0, CONFIG.block_p)
    return off_c, off_p


@triton.jit
def step_features(step, sizes, CONFIG: tl.constexpr):
    """Return the features [block_f] of a step in the weight's order, int64, and which of them exist."""
    C, _, _, GRID_H, GRID_W, _, _ = sizes
    off = tl.arange(0, CONFIG.block_f)
    if CONFIG.one_window:
        off_f = step * CONFIG.block_f + off
        mask_f = off_f < feature_count(sizes) // CONFIG.unit * CONFIG.unit  # of products Triton knows nothing
    else:
        blocks_p = tl.cdiv(GRID_H * GRID_W, CONFIG.block_p)
        off_c = step // blocks_p * CONFIG.block_c + off // CONFIG.block_p
        off_p = step % blocks_p * CONFIG.block_p + off % CONFIG.block_p
        off_f = off_c.to(tl.int64) * (GRID_H * GRID_W) + off_p
        mask_f = (off_c < C) & (off_p < GRID_H * GRID_W)
    return off_f.to(tl.int64), mask_f


@triton.jit
def feature_block(x, step, off_f, mask_f, off_n, sizes, N, CONFIG: tl.constexpr):
    """Read the features [block_n, block_f] of a step, those of their ReLU if the head rectifies; 0 where masked."""
    x, stride_xn, stride_xc, stride_xh, stride_xw = x
    C, _, _, GRID_H, GRID_W, _, _ = sizes
    mask_n = off_n < N
    sample = x + off_n.to(tl.int64) * known_multiple(stride_xn, CONFIG.unit)
    if CONFIG.one_window:
        pointer = sample[:, None] + (off_f * stride_xc)[None, :]
        block = tl.load(pointer, mask=mask_n[:, None] & mask_f[None, :], other=0.0)
    else:
        off_c, off_p = step_blocks(step, sizes, CONFIG)
        position = position_offsets(off_p, GRID_W, stride_xh, stride_xw)
        off_x = off_c.to(tl.int64) * stride_xc
        mask_p = off_p < GRID_H * GRID_W
        mask_c = off_c < C
        if CONFIG.transposes:
            pointer = sample[:, None, None] + position[None, :, None] + off_x[None, None, :]
            mask = mask_n[:, None, None] & mask_p[None, :, None] & mask_c[None, None, :]
            block = tl.permute(tl.load(pointer, mask=mask, other=0.0), (0, 2, 1))
        else:
            pointer = sample[:, None, None] + off_x[None, :, None] + position[None, None, :]
            mask = mask_n[:, None, None] & mask_c[None, :, None] & mask_p[None, None, :]
            block = tl.load(pointer, mask=mask, other=0.0)
        block = tl.reshape(block, (CONFIG.block_n, CONFIG.block_f))
    return rectified(block.to(tl.float32)).to(block.dtype) if CONFIG.rectifies else block


@triton.jit
def send_statistics(pid_n, x, norm, statistics, sizes, N, CONFIG: tl.constexpr):
    """Send mean and 1 / standard deviation of a sample's features, as torch.nn.LayerNorm takes them."""
    off_n = pid_n + tl.arange(0, 1)
    mean, scale = norm_statistics(x, pid_n, sizes, norm[2], N, CONFIG)
    send(statistics + off_n, tl.zeros((1,), tl.float32) + mean, off_n < N)
    send(statistics + off_n + N, tl.zeros((1,), tl.float32) + scale, off_n < N)
