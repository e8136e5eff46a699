"""Layers between a head's pool and its last linear layer, as reference/hidden_layers.py defines them."""

import triton
import triton.language as tl

from ..reference import hidden_layers

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
        return value / (1.0 + tl.exp(-twice))  # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
    else:
        tl.static_assert(ACTIVATION == HARDSWISH)
        kept = tl.where(value < -3.0, 0.0, tl.where(value > 3.0, 6.0, value + 3.0))  # NaN stays NaN
        return value * kept * 0.16666666666666666  # as PyTorch does on GPUs
