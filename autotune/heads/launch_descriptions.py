"""Descriptions of launches for processes that compile them ahead, without a network's data or its GPU.

They are hashable and small; ``launch`` launches on tensors of the process' CPU.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.choose_config import overriding
from ...kernels.head_shape import HeadShape
from ...kernels.launch_config import LaunchConfig
from ...model import FusedAuxHead
from .alone import AloneHead
from .captured_launches import launch_heads


class TensorDescription(NamedTuple):
    """All of a tensor but its data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "TensorDescription":
        """Describe a tensor."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    def allocate(self) -> Tensor:
        """Return such a tensor on the CPU, where it takes up addresses but no memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


class HeadDescription(NamedTuple):
    """All of a head and its input that launches are compiled for."""

    x: TensorDescription
    classes: int
    features: int
    bias: bool
    pool: str
    pool_size: tuple[int, int]
    return_probs: bool

    @classmethod
    def of(cls, alone: AloneHead) -> "HeadDescription":
        """Describe a head."""
        head, linear = alone.head, alone.head.linear
        return cls(
            TensorDescription.of(alone.x), head.num_classes, linear.in_features, linear.bias is not None,
            head.pool, head.pool_size, head.return_probs,
        )  # fmt: skip


@lru_cache(maxsize=32)
def _build(head: HeadDescription) -> AloneHead:
    module = FusedAuxHead(
        head.features, head.classes, pool=head.pool, pool_size=head.pool_size,
        return_probs=head.return_probs, bias=head.bias, dtype=head.x.dtype,
    )  # fmt: skip
    return AloneHead(module, head.x.allocate())


class AloneLaunch(NamedTuple):
    """A launch of one head by itself."""

    head: HeadDescription
    config: LaunchConfig

    def launch(self) -> None:
        """Launch such a head."""
        _build(self.head).launch(self.config)


class NetworkLaunches(NamedTuple):
    """Launches of a network's heads; see ``captured_launches.launch_heads``."""

    heads: tuple[HeadDescription, ...]
    """Heads of the taps."""
    classifier: HeadDescription | TensorDescription
    """The network's own, or its logits where it is no head."""
    ends: tuple[int, ...]
    exits: frozenset[int]
    configs: tuple[tuple[tuple[HeadShape, str], LaunchConfig], ...]
    """Configurations of heads, by shape and place."""

    def launch(self) -> None:
        """Launch such heads."""
        last = self.classifier
        classifier = _build(last) if isinstance(last, HeadDescription) else last.allocate()
        with overriding(dict(self.configs)):
            launch_heads([*map(_build, self.heads), classifier], self.ends, self.exits)


LaunchDescription = AloneLaunch | NetworkLaunches
