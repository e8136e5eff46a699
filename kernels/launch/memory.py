"""Memory that a launch is given: a head's parameters as its kernel takes them, and what its programs hand over in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.hidden_layers import HiddenLayers
from .launch_config import LaunchConfig, Programs


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


class Workspace(NamedTuple):
    """Memory of one head in one launch, one-dimensional; its layout: ``head_stages.head_program``."""

    features: Tensor | None
    """Pooled features if tiled, int32."""
    partial: Tensor
    """Partial logits: int32 where programs wait for them (``LaunchConfig.hands_over``), else float32."""
    arrived: Tensor | None
    """Programs of each sample that are done, [N] int32; None where programs wait instead."""

    @classmethod
    def of(cls, config: LaunchConfig, programs: Programs, zeros: Tensor) -> "Workspace":
        """Divide ``zeros``, [programs.zeroed] int32, which the launch sets back to 0; allocate what need not be 0."""
        if config.hands_over:
            return cls(zeros[programs.partial_sums :] if config.tiled else None, zeros, None)
        return cls(None, torch.empty(programs.partial_sums, dtype=torch.float32, device=zeros.device), zeros)
