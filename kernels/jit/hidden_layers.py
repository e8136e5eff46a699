"""Layers between a head's pool and its last linear layer, inside the kernels; hidden_layers.py has the definitions."""

import triton
import triton.language as tl

from ..reference import hidden_layers
from .hand_over import INTERPRETED, awaited, rows_waited_for, seen

# Triton takes numbers in tuples, and no text. NO_ACTIVATION: the head has no hidden layer.
NO_ACTIVATION = tl.constexpr(hidden_layers.NO_ACTIVATION)
RELU = tl.constexpr(hidden_layers.number_of_activation("relu"))
GELU = tl.constexpr(hidden_layers.number_of_activation("gelu"))
GELU_TANH = tl.constexpr(hidden_layers.number_of_activation("gelu_tanh"))
HARDSWISH = tl.constexpr(hidden_layers.number_of_activation("hardswish"))


@triton.jit
def rectified(value):
    """Return the ReLU of numbers; NaN stays NaN, as in PyTorch."""
    return tl.where(value < 0.0, 0.0, value)


@triton.jit
def activated(value, ACTIVATION: tl.constexpr):
    """Return what an activation makes of float32 numbers."""
    if ACTIVATION == RELU:
        return rectified(value)
    elif ACTIVATION == GELU:
        return value * 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        return value * (1.0 - tl.div_rn(1.0, 1.0 + tl.exp(twice)))  # (1 + tanh(u)) / 2 = 1 - 1 / (1 + exp(2 u))
    else:
        tl.static_assert(ACTIVATION == HARDSWISH)
        kept = tl.where(value < -3.0, 0.0, tl.where(value > 3.0, 6.0, value + 3.0))  # NaN stays NaN
        return tl.div_rn(value * kept, tl.full((1, 1), 6.0, tl.float32))


@triton.jit
def sample_features(features, pid_n, off_f, end_f, N, F, CONFIG: tl.constexpr):
    """Wait for features [BLOCK_F] of one sample and add up the parts of their windows; 0 from ``end_f`` on."""
    THREADS: tl.constexpr = 0 if INTERPRETED else tl.extra.cuda.num_threads()
    off_part = tl.arange(0, rows_waited_for(CONFIG.window_parts, CONFIG.block_f, THREADS))
    mask = (off_part < CONFIG.window_parts)[:, None] & (off_f < end_f)[None, :]
    row = (off_part.to(tl.int64) * N + pid_n) * F
    pointer = features + row[:, None] + off_f[None, :]
    return tl.sum(awaited(seen(pointer, mask), pointer, mask), axis=0)


@triton.jit
def norm_statistics(features, pid_n, N, F, eps, CONFIG: tl.constexpr):
    """Return mean and 1 / standard deviation of the features of a sample, as torch.nn.LayerNorm takes them."""
    BLOCK_F: tl.constexpr = CONFIG.block_f
    count = tl.zeros((), tl.float32) + F
    acc = tl.zeros((BLOCK_F,), tl.float32)
    for start_f in range(0, F, BLOCK_F):
        off_f = start_f + tl.arange(0, BLOCK_F)
        acc += sample_features(features, pid_n, off_f, F, N, F, CONFIG)
    mean = tl.div_rn(tl.sum(acc), count)
    acc = tl.zeros((BLOCK_F,), tl.float32)
    for start_f in range(0, F, BLOCK_F):  # of distances from the mean: squares of large numbers would cancel
        off_f = start_f + tl.arange(0, BLOCK_F)
        value = sample_features(features, pid_n, off_f, F, N, F, CONFIG)
        value = tl.where(off_f < F, value - mean, 0.0)
        acc += value * value
    return mean, tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(acc), count) + eps))


@triton.jit
def normed(value, mean, scale, norm_weight, norm_bias, off_f, end_f):
    """Return features [BLOCK_F] normalised, with the weight and bias of the norm, of which either may be None."""
    weight, stride_nw = norm_weight
    bias, stride_nb = norm_bias
    mask = off_f < end_f
    value = (value - mean) * scale
    if weight is not None:
        value *= tl.load(weight + off_f.to(tl.int64) * stride_nw, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + off_f.to(tl.int64) * stride_nb, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, value, 0.0)
