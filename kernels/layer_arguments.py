"""Arguments of the kernels for a head's layers: those of its first linear layer, of its norm and of a last one."""

from typing import Any

import torch
from torch import Tensor

from .hidden_layers import HiddenLayers


def first_layer(weight: Tensor, bias: Tensor | None, hidden: HiddenLayers) -> tuple[Any, ...]:
    """Return weight, its strides, bias and its stride of the linear layer that reads the features."""
    if hidden.weight is not None:
        weight, bias = hidden.weight, hidden.bias
    return (weight, *weight.stride(), bias, _stride(bias))


def norm_arguments(hidden: HiddenLayers) -> tuple[Any, ...] | None:
    """Return weight and bias of the norm, each with its stride, and eps; None if there is none."""
    if hidden.eps is None:
        return None
    weight, bias = hidden.norm_weight, hidden.norm_bias
    return (weight, _stride(weight), bias, _stride(bias), float(hidden.eps))


def last_layer(weight: Tensor, bias: Tensor | None, hidden: HiddenLayers, samples: int) -> tuple[Any, ...] | None:
    """Return the layer that reads the hidden features, and memory for logits; None where the first is the last."""
    if hidden.weight is None:
        return None
    logits = torch.empty(samples * weight.shape[0], dtype=torch.float32, device=weight.device)
    return (weight, *weight.stride(), bias, _stride(bias), logits)


def _stride(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.stride(0)
