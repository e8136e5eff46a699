"""Arguments of the kernels for a head's layers: those of its first linear layer, of its norm and of a last one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..reference.hidden_layers import HiddenLayers


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


def launched_parameters(given: Mapping[str, Any]) -> list[Tensor]:
    """Return a head's parameters of a noted launch's arguments: of the last linear layer, the norm, the first one."""
    first = (given["weight"], given["bias"])
    weight, _, _, bias, *_ = given["last"] or (None, None, None, None)
    norm_weight, _, norm_bias, *_ = given["norm"] or (None, None, None)
    last = first if weight is None else (weight, bias)
    found = (*last, norm_weight, norm_bias, *(() if weight is None else first))
    return [one for one in found if one is not None]


def _stride(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.stride(0)
