"""Triton kernel of depthwise convolutions of channels_last maps, with what follows; kernels/depthwise.py launches it.

    out[n, c, i, j] = f(bias[c] + sum of weight[c, a, b] * x[n, c, i * stride_h - padding_h + a * dilation_h, ...])

A program takes a block of output positions times a block of channels, as that of ``max_pool`` does: it reads rows of
whole cache lines, each from memory once and by the other windows from caches. Prefixes of names: see ``head``.
"""

import triton
import triton.language as tl

from ..reference import depthwise
from .hidden_layers import HARDSWISH, activated, rectified

RELU = tl.constexpr(depthwise.number_of_following("relu"))
RELU6 = tl.constexpr(depthwise.number_of_following("relu6"))
SILU = tl.constexpr(depthwise.number_of_following("silu"))
THEN_HARDSWISH = tl.constexpr(depthwise.number_of_following("hardswish"))


# Sizes of layers are not compiled for, but for the window, which is written out: networks have many.
@triton.jit(do_not_specialize=["STRIDE_H", "STRIDE_W", "PADDING_H", "PADDING_W", "DILATION_H", "DILATION_W"])
def depthwise_kernel(
    x,  # [N, C, H, W], dense in the order N, H, W, C
    weight,  # [C, 1, WINDOW_H, WINDOW_W], dense in the order WINDOW_H, WINDOW_W, C
    bias,  # [C], or none
    out,  # [N, C, OUT_H, OUT_W], dense in the order N, OUT_H, OUT_W, C
    POSITIONS, C, H, W, OUT_H, OUT_W,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, STRIDE_H, STRIDE_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W,
    FOLLOWING: tl.constexpr, VECTOR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Convolve a block of positions by a block of channels, in float32; the launcher has sized everything."""
    C = C // VECTOR * VECTOR  # which it is: so many channels can be read at once
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
    start = x + (((row + start_h) * W + start_w) * C)[:, None] + off_c[None, :]
    acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for a in tl.static_range(WINDOW_H):
        off_h = start_h + a * DILATION_H
        mask_h = mask_p & (off_h >= 0) & (off_h < H)
        for b in tl.static_range(WINDOW_W):
            off_w = start_w + b * DILATION_W
            inside = mask_h & (off_w >= 0) & (off_w < W)
            pointer = start + (a * DILATION_H * W + b * DILATION_W) * C
            value = tl.load(pointer, mask=inside[:, None] & mask_c[None, :], other=0.0).to(tl.float32)
            factor = tl.load(weight + (a * WINDOW_W + b) * C + off_c, mask=mask_c, other=0.0).to(tl.float32)
            acc += value * factor[None, :]
    if bias is not None:
        acc += tl.load(bias + off_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
    if FOLLOWING == RELU or FOLLOWING == RELU6:
        acc = rectified(acc)
        if FOLLOWING == RELU6:
            acc = tl.where(acc > 6.0, 6.0, acc)
    elif FOLLOWING == SILU:
        acc = tl.div_rn(acc, 1.0 + tl.exp(-acc))
    elif FOLLOWING == THEN_HARDSWISH:
        acc = activated(acc, HARDSWISH)
    tl.store(
        out + off_p[:, None] * C + off_c[None, :], acc.to(out.dtype.element_ty), mask=mask_p[:, None] & mask_c[None, :]
    )
