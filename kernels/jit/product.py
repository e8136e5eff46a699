"""Product of features and weight: by the programs that pooled them (split), or by others that wait for them (tiles).

Sums are float32. Each part of one, over some of the features, goes to a row of ``partial`` [parts, N, row_width].
"""

import triton
import triton.language as tl

from .hand_over import awaited, awaited_sum, dot, seen, send
from .norm import norm_statistics, normed, sample_features
from .pool import known_multiple


@triton.jit
def weight_block(column, stride_wk, mask_f, off_k, K):
    """Read rows [BLOCK_K] of the weight at the features that ``column`` points to; 0 where masked."""
    pointer = column[None, :] + (off_k.to(tl.int64) * stride_wk)[:, None]
    return tl.load(pointer, mask=(off_k < K)[:, None] & mask_f[None, :], other=0.0)


@triton.jit
def split_product(pooled, block, column, stride_wk, mask_f, row, CONFIG: tl.constexpr):
    """Multiply features with their columns of the weight, whose first ``block`` is here; leave the sums in a row."""
    for start_k in range(0, CONFIG.sent, CONFIG.block_k):  # beyond the last row, too, if that is waited for
        off_k = start_k + tl.arange(0, CONFIG.block_k)
        following = weight_block(column, stride_wk, mask_f, off_k + CONFIG.block_k, CONFIG.rows)
        product_k = tl.sum(block.to(tl.float32) * pooled, axis=1)
        if CONFIG.waits:
            send(row + off_k, product_k, off_k < CONFIG.sent)
        else:
            tl.store(row + off_k, product_k, mask=off_k < CONFIG.sent)
        block = following


@triton.jit
def tile_product(pid_tile, weight, norm, features, partial, F, sizes, N, CONFIG: tl.constexpr):
    """Wait for features of a group of samples, multiply them with some rows of the weight, and leave the sums."""
    pid_group = pid_tile // CONFIG.tiles
    off_n = pid_group * CONFIG.block_n + tl.arange(0, CONFIG.block_n)
    mask_n = off_n < N
    pid_s = pid_tile % CONFIG.block_s
    off_k = pid_tile % CONFIG.tiles // CONFIG.block_s * CONFIG.block_k + tl.arange(0, CONFIG.block_k)
    share = tl.cdiv(tl.cdiv(F, CONFIG.block_f), CONFIG.block_s) * CONFIG.block_f
    first_f = pid_s * share
    last_f = known_multiple(tl.minimum(first_f + share, F), CONFIG.unit)
    if CONFIG.block_n == 1:
        tile = sample_tile(features, pid_group, weight, norm, off_k, first_f, last_f, sizes, N, CONFIG)
    else:
        tile = group_tile(features, off_n, weight, off_k, first_f, last_f, F, N, CONFIG)
    # Features are cleared once all sums are there. A step has no fewer of them than there are threads, which
    # ``rows_waited_for`` sees to: so one thread alone waits for each, a sum needs those of all warps, and none is sent
    # before.
    row = tl.cast(pid_s, tl.int64) * N + off_n.to(tl.int64)
    pointer = partial + row[:, None] * CONFIG.row_width + off_k[None, :]
    send(pointer, tile, mask_n[:, None] & (off_k < CONFIG.sent)[None, :])


@triton.jit
def sample_tile(features, pid_n, weight, norm, off_k, first_f, last_f, sizes, N, CONFIG: tl.constexpr):
    """Multiply features ``first_f`` to ``last_f`` of one sample, normed if there is a norm; returns [1, BLOCK_K]."""
    BLOCK_F: tl.constexpr = CONFIG.block_f
    weight, stride_wk, stride_wf = weight
    stride_wk = known_multiple(stride_wk, CONFIG.unit)
    off_f = first_f + tl.arange(0, BLOCK_F)
    column = weight + off_f.to(tl.int64) * stride_wf
    right = weight_block(column, stride_wk, off_f < last_f, off_k, CONFIG.rows)  # on its way while others pool
    if CONFIG.norms:
        mean, scale = norm_statistics(features, pid_n, sizes, norm[2], N, CONFIG)
    tile = tl.full((1, CONFIG.block_k), 0.0, tl.float32)
    for start_f in range(first_f, last_f, BLOCK_F):
        off_f = start_f + tl.arange(0, BLOCK_F)
        left = sample_features(features, pid_n, off_f, last_f, sizes, N, CONFIG)
        if CONFIG.norms:
            left = normed(left, mean, scale, norm, off_f, off_f < last_f)
        tile += tl.sum(right.to(tl.float32) * left[None, :], axis=1)[None, :]
        column += tl.cast(BLOCK_F, tl.int64) * stride_wf
        right = weight_block(column, stride_wk, off_f + BLOCK_F < last_f, off_k, CONFIG.rows)
    return tile


@triton.jit
def group_tile(features, off_n, weight, off_k, first_f, last_f, F, N, CONFIG: tl.constexpr):
    """Multiply features ``first_f`` to ``last_f`` of samples [BLOCK_N] on tensor cores; returns [BLOCK_N, BLOCK_K].

    Of the next step features are on their way while those of this one are multiplied, and so is the weight, in
    registers. With ``weight_buffers`` Triton reads it so many steps less one ahead, if in vectors, before the loop
    waits for features.
    """
    BLOCK_F: tl.constexpr = CONFIG.block_f
    AHEAD: tl.constexpr = CONFIG.weight_buffers == 0
    PARTS: tl.constexpr = CONFIG.window_parts > 1
    weight, stride_wk, stride_wf = weight
    stride_wk = known_multiple(stride_wk, CONFIG.unit)
    mask_n = off_n < N
    off_f = first_f + tl.arange(0, BLOCK_F)
    column = weight + off_f.to(tl.int64) * stride_wf
    if AHEAD:
        right = weight_block(column, stride_wk, off_f < last_f, off_k, CONFIG.rows)
    tile = tl.full((CONFIG.block_n, CONFIG.block_k), 0.0, tl.float32)
    part_size = tl.cast(N, tl.int64) * F
    first_part = features + (off_n.to(tl.int64) * F)[:, None]
    mask = mask_n[:, None] & (off_f < last_f)[None, :]
    read = seen(first_part + off_f[None, :], mask)
    other = seen(first_part + off_f[None, :] + part_size, mask) if PARTS else read
    for start_f in tl.range(first_f, last_f, BLOCK_F, num_stages=CONFIG.weight_buffers or None):
        off_f = start_f + tl.arange(0, BLOCK_F)
        if not AHEAD:
            right = weight_block(column, stride_wk, off_f < last_f, off_k, CONFIG.rows)
        mask = mask_n[:, None] & (off_f < last_f)[None, :]
        pointer = first_part + off_f[None, :]
        left = awaited_parts(read, other, pointer, part_size, mask, CONFIG)
        mask = mask_n[:, None] & (off_f + BLOCK_F < last_f)[None, :]
        # not written alike on purpose: that compiles to other code than was measured
        following = first_part + (off_f + BLOCK_F)[None, :] if AHEAD else pointer + BLOCK_F
        read = seen(following, mask)
        other = seen(following + part_size, mask) if PARTS else read
        tile = dot(left.to(right.dtype), tl.trans(right), tile, "ieee")
        column += tl.cast(BLOCK_F, tl.int64) * stride_wf
        if AHEAD:
            right = weight_block(column, stride_wk, off_f + BLOCK_F < last_f, off_k, CONFIG.rows)
    return tile


@triton.jit
def awaited_parts(read, other, pointer, part_size, mask, CONFIG: tl.constexpr):
    """Wait for features [BLOCK_N, BLOCK_F] of a group and add up their parts, the first of which were looked for."""
    if CONFIG.window_parts == 1:
        return awaited(read, pointer, mask)
    else:
        features = awaited_sum(read, other, pointer, pointer + part_size, mask)
        for _ in range(2, CONFIG.window_parts, 2):
            pointer += 2 * part_size
            read, other = seen(pointer, mask), seen(pointer + part_size, mask)
            features += awaited_sum(read, other, pointer, pointer + part_size, mask)
        return features
