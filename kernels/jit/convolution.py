"""Triton kernels of convolutions of channels_last maps, with what follows; kernels/convolution.py launches them.

    out[n, o, i, j] = f(bias[o] + addend[n, o, i, j]
                        + sum of weight[o, c, a, b] * x[n, c, i * stride_h - padding_h + a * dilation_h, ...])

In a depthwise one o = c, and nothing is summed over channels. Prefixes of names: see ``head``.
"""

import triton
import triton.language as tl

from ..reference import convolution
from .hand_over import await_launch_before, dot
from .hidden_layers import GELU, GELU_TANH, HARDSWISH, activated, rectified

RELU = tl.constexpr(convolution.number_of_following("relu"))
RELU6 = tl.constexpr(convolution.number_of_following("relu6"))
SILU = tl.constexpr(convolution.number_of_following("silu"))
THEN_HARDSWISH = tl.constexpr(convolution.number_of_following("hardswish"))
THEN_GELU = tl.constexpr(convolution.number_of_following("gelu"))
THEN_GELU_TANH = tl.constexpr(convolution.number_of_following("gelu_tanh"))
#: Sizes of layers are not compiled for: networks have many.
SIZES = [
    "C", "ROW_X", "ROW_OUT", "H", "W", "OUT_H", "OUT_W", "STRIDE_W", "PADDING_H", "PADDING_W", "DILATION_W",
]  # fmt: skip


@triton.jit
def followed(acc, FOLLOWING: tl.constexpr):
    """Return what follows a convolution of its float32 sums."""
    if FOLLOWING == RELU or FOLLOWING == RELU6:
        acc = rectified(acc)
        if FOLLOWING == RELU6:
            acc = tl.where(acc > 6.0, 6.0, acc)
    elif FOLLOWING == SILU:
        acc = acc / (1.0 + tl.exp(-acc))
    elif FOLLOWING == THEN_HARDSWISH:
        acc = activated(acc, HARDSWISH)
    elif FOLLOWING == THEN_GELU:
        acc = activated(acc, GELU)
    elif FOLLOWING == THEN_GELU_TANH:
        acc = activated(acc, GELU_TANH)
    return acc


# A program takes a block of channels times a block of strips: ROWS output positions, one below the other. For each
# column of the window a strip's numbers are read once, and every output whose window has them takes them from
# registers, since the compiler makes one of equal loads: of a window of 7 x 7 a strip of 7 rows reads 13 numbers an
# output, not 49. A program of one row has the whole window written out, so that all of its loads are under way at once.
@triton.jit(do_not_specialize=[*SIZES, "STRIPS"])
def depthwise_kernel(
    x,  # [N, C, H, W], in the order N, H, W, C, with ROW_X numbers from position to position
    weight,  # [C, 1, WINDOW_H, WINDOW_W], dense in the order WINDOW_H, WINDOW_W, C
    bias,  # [C], or none
    out,  # [N, C, OUT_H, OUT_W], likewise, with ROW_OUT
    STRIPS, C, ROW_X, ROW_OUT, H, W, OUT_H, OUT_W,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W, PADDING_H, PADDING_W,
    DILATION_H: tl.constexpr, DILATION_W,
    FOLLOWING: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    """Convolve a block of strips by a block of channels, in float32; the launcher has sized everything."""
    C = C // VECTOR * VECTOR  # which it is: so many channels can be read at once
    ROW_X = ROW_X // VECTOR * VECTOR
    ROW_OUT = ROW_OUT // VECTOR * VECTOR
    channel_blocks = tl.cdiv(C, BLOCK_C)
    pid_c = tl.program_id(0) % channel_blocks
    pid_p = tl.program_id(0) // channel_blocks
    off_c = pid_c * BLOCK_C + tl.arange(0, BLOCK_C)
    off_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    mask_c = off_c < C
    mask = (off_p < STRIPS)[:, None] & mask_c[None, :]
    strips = tl.cdiv(OUT_H, ROWS)  # of a column of a sample's
    column = off_p % OUT_W
    line = off_p // OUT_W % strips * ROWS
    sample = off_p // OUT_W // strips
    start_h = line * STRIDE_H - PADDING_H
    start_w = column * STRIDE_W - PADDING_W
    start = x + (((sample * H + start_h) * W + start_w) * ROW_X)[:, None] + off_c[None, :]
    sums = (tl.zeros((BLOCK_P, BLOCK_C), tl.float32),) * ROWS
    await_launch_before(EARLY_START)
    for b in tl.range(0, WINDOW_W, loop_unroll_factor=WINDOW_W if ROWS == 1 else 1):
        off_w = start_w + b * DILATION_W
        mask_w = (off_w >= 0) & (off_w < W)
        before, sums = sums, ()
        for row in tl.static_range(ROWS):
            acc = before[row]
            for a in tl.static_range(WINDOW_H):
                down = row * STRIDE_H + a * DILATION_H
                inside = mask_w & (start_h + down >= 0) & (start_h + down < H)
                pointer = start + (down * W + b * DILATION_W) * ROW_X
                value = tl.load(pointer, mask=inside[:, None] & mask, other=0.0).to(tl.float32)
                factor = tl.load(weight + (a * WINDOW_W + b) * C + off_c, mask=mask_c, other=0.0).to(tl.float32)
                acc += value * factor[None, :]
            sums += (acc,)
    for row in tl.static_range(ROWS):
        acc = sums[row]
        if bias is not None:
            acc += tl.load(bias + off_c, mask=mask_c, other=0.0).to(tl.float32)[None, :]
        tl.store(
            out + (((sample * OUT_H + line + row) * OUT_W + column) * ROW_OUT)[:, None] + off_c[None, :],
            followed(acc, FOLLOWING).to(out.dtype.element_ty),
            mask=(line + row < OUT_H)[:, None] & mask,
        )


# A program multiplies a block of output positions and a block of channels on tensor cores. With several SLICES each
# warp takes a part of the numbers that are summed: of a map of few positions there are few programs, in which one warp
# after another would wait for the same loads. Nothing is divided in the loop, and nothing branches, or loads would not
# run ahead: the place in the window is counted.
@triton.jit(do_not_specialize=[*SIZES, "POSITIONS", "OUTPUTS", "WINDOW_H", "WINDOW_W", "STRIDE_H", "DILATION_H"])
def convolution_kernel(
    x,  # [N, C, H, W], in the order N, H, W, C, with ROW_X numbers from position to position
    weight,  # [OUTPUTS, C, WINDOW_H, WINDOW_W], dense in the order OUTPUTS, WINDOW_H, WINDOW_W, C
    bias,  # [OUTPUTS], or none
    addend,  # [N, OUTPUTS, OUT_H, OUT_W], dense in the order N, OUT_H, OUT_W, OUTPUTS, or none
    out,  # likewise, with ROW_OUT numbers from position to position
    POSITIONS, C, OUTPUTS, ROW_X, ROW_OUT, H, W, OUT_H, OUT_W,
    WINDOW_H, WINDOW_W, STRIDE_H, STRIDE_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W,
    FOLLOWING: tl.constexpr, VECTOR: tl.constexpr, IS_PRODUCT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, SLICES: tl.constexpr,
    EARLY_START: tl.constexpr,
):  # fmt: skip
    """Convolve a block of positions to a block of channels; IS_PRODUCT: every position is its own window."""
    C = C // VECTOR * VECTOR  # which it is: so many channels can be read at once
    OUTPUTS = OUTPUTS // VECTOR * VECTOR
    ROW_X = ROW_X // VECTOR * VECTOR
    ROW_OUT = ROW_OUT // VECTOR * VECTOR
    channel_blocks = tl.cdiv(OUTPUTS, BLOCK_O)
    pid_p = tl.program_id(0) // channel_blocks
    pid_o = tl.program_id(0) - pid_p * channel_blocks
    off_p = pid_p * BLOCK_P + tl.arange(0, BLOCK_P)
    off_o = pid_o * BLOCK_O + tl.arange(0, BLOCK_O)
    mask_out = (off_p < POSITIONS)[:, None] & (off_o < OUTPUTS)[None, :]
    await_launch_before(EARLY_START)
    # What is added is there when the sums are.
    if bias is not None:
        constant = tl.load(bias + off_o, mask=off_o < OUTPUTS, other=0.0)
    if addend is not None:
        summand = tl.load(addend + off_p[:, None] * OUTPUTS + off_o[None, :], mask=mask_out, other=0.0)
    # positions times channels of x, and of these times those of out
    if SLICES == 1:
        row_p, column_o = off_p[:, None], off_o[None, :]
        off_c = tl.arange(0, BLOCK_C)
        column_c, row_c = off_c[None, :], off_c[:, None]
        acc = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    else:
        row_p, column_o = off_p[None, :, None], off_o[None, None, :]
        off_c = tl.arange(0, SLICES)[:, None] * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
        column_c, row_c = off_c[:, None, :], off_c[:, :, None]
        acc = tl.zeros((SLICES, BLOCK_P, BLOCK_O), tl.float32)
    mask_p = row_p < POSITIONS
    if IS_PRODUCT:
        start_h, start_w, start = row_p, row_p, row_p
        window = 1
    else:
        line = row_p // OUT_W
        sample = line // OUT_H
        start_h = (line - sample * OUT_H) * STRIDE_H - PADDING_H
        start_w = (row_p - line * OUT_W) * STRIDE_W - PADDING_W
        start = (sample * H + start_h) * W + start_w
        window = WINDOW_H * WINDOW_W
    values = x + start * ROW_X + column_c
    factors = weight + column_o * (window * C) + row_c
    a, b, place, channel = 0, 0, 0, 0  # in the window; channels before it in the weight, and before this step's
    for _ in tl.range(0, window * tl.cdiv(C, BLOCK_C * SLICES), num_stages=STAGES):
        if IS_PRODUCT:
            inside = mask_p
            step = channel
        else:
            off_h = start_h + a * DILATION_H
            off_w = start_w + b * DILATION_W
            inside = mask_p & (off_h >= 0) & (off_h < H) & (off_w >= 0) & (off_w < W)
            step = (a * DILATION_H * W + b * DILATION_W) * ROW_X + channel
        value = tl.load(values + step, mask=inside & (channel + column_c < C), other=0.0)
        factor = tl.load(factors + place + channel, mask=(column_o < OUTPUTS) & (channel + row_c < C), other=0.0)
        acc = dot(value, factor, acc, "ieee")
        channel += BLOCK_C * SLICES
        if not IS_PRODUCT:
            is_last = channel >= C
            channel = tl.where(is_last, 0, channel)
            place = tl.where(is_last, place + C, place)
            b = tl.where(is_last, b + 1, b)
            is_last = b == WINDOW_W
            b = tl.where(is_last, 0, b)
            a = tl.where(is_last, a + 1, a)
    if SLICES > 1:
        acc = tl.sum(acc, 0)
    if bias is not None:
        acc += constant.to(tl.float32)[None, :]
    if addend is not None:
        acc += summand.to(tl.float32)
    pointer = out + off_p[:, None] * ROW_OUT + off_o[None, :]
    tl.store(pointer, followed(acc, FOLLOWING).to(out.dtype.element_ty), mask=mask_out)
