"""LayerNorm over the features of a sample: its statistics, by a program that is sent the features or reads them."""

import triton
import triton.language as tl

from .hand_over import INTERPRETED, awaited, rows_waited_for, seen
from .hidden_layers import rectified
from .pool import feature_count


@triton.jit
def normed(value, mean, scale, norm, off_f, mask_f):
    """Return features [..., BLOCK_F] normalised, float32, with the norm's weight and bias where it has them."""
    weight, stride_nw = norm[0]
    bias, stride_nb = norm[1]
    value = (value.to(tl.float32) - mean) * scale
    if weight is not None:
        value *= tl.load(weight + off_f.to(tl.int64) * stride_nw, mask=mask_f, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + off_f.to(tl.int64) * stride_nb, mask=mask_f, other=0.0).to(tl.float32)
    return tl.where(mask_f, value, 0.0)


@triton.jit
def norm_statistics(features, pid_n, sizes, eps, N, CONFIG: tl.constexpr):
    """Return mean and 1 / standard deviation of the features of a sample, as torch.nn.LayerNorm takes them."""
    F = feature_count(sizes)
    BLOCK: tl.constexpr = CONFIG.statistics_block
    count = tl.zeros((), tl.float32) + F
    acc = tl.zeros((BLOCK,), tl.float32)
    for start_f in range(0, F, BLOCK):
        acc += sample_features(features, pid_n, start_f + tl.arange(0, BLOCK), F, sizes, N, CONFIG)
    mean = tl.div_rn(tl.sum(acc), count)
    acc = tl.zeros((BLOCK,), tl.float32)
    rest = tl.zeros((BLOCK,), tl.float32)
    for start_f in range(0, F, BLOCK):  # of distances from the mean: squares of large numbers would cancel
        off_f = start_f + tl.arange(0, BLOCK)
        value = sample_features(features, pid_n, off_f, F, sizes, N, CONFIG) - mean
        value = tl.where(off_f < F, value, 0.0)
        acc += value * value
        rest += value
    off = tl.div_rn(tl.sum(rest), count)  # by rounding; equal features would differ from the mean by that alone
    variance = tl.maximum(tl.div_rn(tl.sum(acc), count) - off * off, 0.0)
    return mean + off, tl.div_rn(1.0, tl.sqrt_rn(variance + eps))


@triton.jit
def sample_features(features, pid_n, off_f, end_f, sizes, N, CONFIG: tl.constexpr):
    """Return features [BLOCK_F] of a sample, float32, 0 from ``end_f`` on: sent ones, or as they lie in memory."""
    C, _, _, GRID_H, GRID_W, _, _ = sizes
    if CONFIG.reads:
        x, stride_xn, stride_xc, stride_xh, stride_xw = features
        pointer = x + tl.cast(pid_n, tl.int64) * stride_xn
        if CONFIG.one_window:
            pointer += off_f.to(tl.int64) * stride_xc
        else:  # of a map, in an order of their own, channel by channel of a position
            pointer += position_offsets(off_f // C, GRID_W, stride_xh, stride_xw)
            pointer += (off_f % C).to(tl.int64) * stride_xc
        value = tl.load(pointer, mask=off_f < end_f, other=0.0).to(tl.float32)
        return rectified(value) if CONFIG.rectifies else value
    else:  # wait for them, and add up the parts of their windows
        THREADS: tl.constexpr = 0 if INTERPRETED else tl.extra.cuda.num_threads()
        off_part = tl.arange(0, rows_waited_for(CONFIG.window_parts, CONFIG.block_f, THREADS))
        mask = (off_part < CONFIG.window_parts)[:, None] & (off_f < end_f)[None, :]
        row = (off_part.to(tl.int64) * N + pid_n) * feature_count(sizes)
        pointer = features + row[:, None] + off_f[None, :]
        return tl.sum(awaited(seen(pointer, mask), pointer, mask), axis=0)


@triton.jit
def position_offsets(off_p, GRID_W, stride_xh, stride_xw):
    """Return where positions lie in a channel."""
    return (off_p // GRID_W).to(tl.int64) * stride_xh + (off_p % GRID_W).to(tl.int64) * stride_xw
