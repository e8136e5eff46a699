"""Triton kernel that max-pools channels_last maps in one launch; kernels/max_pool.py launches it.

    out[n, c, i, j] = max of x[n, c, i * stride_h - padding_h + a, j * stride_w - padding_w + b] over a and b

A program takes a block of output positions (of all samples in one row) times a block of channels, which lie next to
each other in memory: every read of the window is a row of whole cache lines. Prefixes of names: see ``head``.
"""

import triton
import triton.language as tl


@triton.jit
def max_pool_kernel(
    x,  # [N, C, H, W], dense in the order N, H, W, C
    out,  # [N, C, OUT_H, OUT_W], dense in the order N, OUT_H, OUT_W, C
    POSITIONS, C, H, W, OUT_H, OUT_W,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Max-pool a block of positions by a block of channels; the launcher has sized everything."""
    channel_blocks = tl.cdiv(C, BLOCK_C)
    pid_c = tl.program_id(0) % channel_blocks
    pid_p = tl.program_id(0) // channel_blocks
    off_c = pid_c * BLOCK_C + tl.arange(0, BLOCK_C)
    off_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_c = off_c < C
    mask_p = off_p < POSITIONS
    start_h = off_p // OUT_W % OUT_H * STRIDE_H - PADDING_H
    start_w = off_p % OUT_W * STRIDE_W - PADDING_W
    row = off_p // OUT_W // OUT_H * H  # of the sample's first line among the lines of all samples
    acc = tl.full((BLOCK_P, BLOCK_C), float("-inf"), tl.float32)
    for a in tl.static_range(WINDOW_H):
        for b in tl.static_range(WINDOW_W):
            off_h = start_h + a
            off_w = start_w + b
            inside = mask_p & (off_h >= 0) & (off_h < H) & (off_w >= 0) & (off_w < W)
            offset = ((row + off_h).to(tl.int64) * W + off_w) * C
            pointer = x + offset[:, None] + off_c[None, :]
            value = tl.load(pointer, mask=inside[:, None] & mask_c[None, :], other=float("-inf")).to(tl.float32)
            # In PyTorch's order and words: of equal zeros the first one stays, and so does NaN, which tl.maximum drops.
            acc = tl.where((value > acc) | (value != value), value, acc)
    pointer = out + off_p.to(tl.int64)[:, None] * C + off_c[None, :]
    tl.store(pointer, acc.to(out.dtype.element_ty), mask=mask_p[:, None] & mask_c[None, :])
