"""HeadArguments: a head's parameters as the kernel takes them; Workspace: memory that its programs share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..reference.hidden_layers import HiddenLayers
from .head_view import HeadView
from .launch_config import LaunchConfig, Programs


class Workspace(NamedTuple):
    """Memory of one head in one launch, one-dimensional; what is int32 is 0 before and after.

    That lies in this order: a large last layer's logits and hidden features; sums; then pooled features, or counters of
    arrivals and statistics. Of one head alone the ticket of programs is behind them.
    """

    features: Tensor | None  # [window_parts, N, C * grid_h * grid_w] int32 pooled features that are awaited, or None
    partial: Tensor
    """[parts, N, row_width] sums: int32 where programs wait for them (``LaunchConfig.hands_over``), else float32. Or
    [N, 4, slices] float32 findings, see jit/slices.py."""
    arrived: Tensor | None  # [N] int32, programs that are done with a sample; None where nobody counts them
    statistics: Tensor | None = None  # [2, N] int32, mean and scale of samples: a norm's where features are read

    @classmethod
    def of(cls, config: LaunchConfig, programs: Programs, zeros: Tensor) -> "Workspace":
        """Divide ``zeros`` but for those of a last layer; allocate what need not be 0."""
        zeros = zeros[programs.last_sums :]
        if config.reads:
            sums, statistics = zeros, zeros[programs.partial_sums + programs.arrivals :]
            if programs.findings:
                sums = torch.empty(programs.findings, dtype=torch.float32, device=zeros.device)
            return cls(None, sums, zeros[programs.partial_sums :] if programs.arrivals else None, statistics)
        if config.hands_over:
            return cls(zeros[programs.partial_sums :] if config.tiled else None, zeros, None)
        return cls(None, torch.empty(programs.partial_sums, dtype=torch.float32, device=zeros.device), zeros)


class HeadArguments(NamedTuple):
    """What ``head_program`` takes of a head, in its order: tuples by meaning, each tensor with its strides behind it.

    Triton takes no named tuple inside a tuple: a launch is given a plain one.
    """

    x: tuple[Any, ...]  # [N, C, H, W] as of ``HeadView``
    weight: tuple[Any, ...]  # [rows, features] of the linear layer that reads the features
    bias: tuple[Any, ...]  # [rows] of that layer, or None
    rule: tuple[Any, ...]  # temperature and threshold: numbers, or tensors of one
    workspace: tuple[Any, ...]  # see :class:`Workspace`
    sizes: tuple[int, ...]  # as of ``HeadView``
    norm: tuple[Any, ...] | None  # weight [features] or None, bias [features] or None, eps; None if there is no norm
    last: tuple[Any, ...] | None
    """Weight [K, rows], bias [K] or None, and if it has programs of its own int32 memory: logits [N, K], then hidden
    features [N, rows], rows of both padded. None if the first layer is the last."""

    @classmethod
    def of(
        cls, x: Tensor, view: HeadView, weight: Tensor, bias: Tensor | None, hidden: HiddenLayers,
        rule: tuple[Any, Any], config: LaunchConfig, programs: Programs, zeros: Tensor,
    ) -> "HeadArguments":  # fmt: skip
        """Take them from a head's parameters; ``zeros``, [programs.zeroed] int32, the launch sets back to 0."""
        norm = last = None
        if hidden.eps is not None:
            norm = (strided(hidden.norm_weight), strided(hidden.norm_bias), float(hidden.eps))
        if hidden.weight is not None:
            last = (strided(weight), strided(bias), zeros[: programs.last_sums] if programs.last_sums else None)
            weight, bias = hidden.weight, hidden.bias
        workspace = tuple(Workspace.of(config, programs, zeros))
        return cls((x, *view.strides), strided(weight), strided(bias), rule, workspace, view.sizes, norm, last)


def strided(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return a tensor and its strides; of a vector that is not there None and 0."""
    return (None, 0) if tensor is None else (tensor, *tensor.stride())
