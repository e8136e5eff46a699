"""Launches described for other processes, which compile what is launched like that without its data or its GPU."""

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels import ExitHead
from ...kernels.choose_config import overriding
from ...kernels.head_shape import HeadShape
from ...kernels.launch_config import LaunchConfig
from ...model import FusedAuxHead
from .alone import AloneHead
from .captured_launches import launch_heads


class Twin(Protocol):
    """Describes launches: hashable, and small enough to be sent."""

    def launch(self) -> object:
        """Launch on tensors of this process' CPU."""


class TensorTwin(NamedTuple):
    """All of a tensor but its data."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "TensorTwin":
        """Describe a tensor."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    def made(self) -> Tensor:
        """Return one like it on the CPU, where it takes up addresses but no memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


class HeadTwin(NamedTuple):
    """All of a head and its input that launches are compiled for."""

    x: TensorTwin
    classes: int
    features: int
    bias: bool
    pool: str
    pool_size: tuple[int, int]
    return_probs: bool

    @classmethod
    def of(cls, alone: AloneHead) -> "HeadTwin":
        """Describe a head."""
        head, linear = alone.head, alone.head.linear
        return cls(
            TensorTwin.of(alone.x), head.num_classes, linear.in_features, linear.bias is not None,
            head.pool, head.pool_size, head.return_probs,
        )  # fmt: skip


@lru_cache(maxsize=32)
def _made(twin: HeadTwin) -> AloneHead:
    head = FusedAuxHead(
        twin.features, twin.classes, pool=twin.pool, pool_size=twin.pool_size,
        return_probs=twin.return_probs, bias=twin.bias, dtype=twin.x.dtype,
    )  # fmt: skip
    return AloneHead(head, twin.x.made())


class AloneTwin(NamedTuple):
    """A launch of one head by itself."""

    head: HeadTwin
    config: LaunchConfig

    def launch(self) -> object:
        """Launch such a head."""
        return _made(self.head).launch(self.config)


class NetworkTwin(NamedTuple):
    """Launches of a network's heads; see ``network_launches.launch_heads``."""

    heads: tuple[HeadTwin, ...]
    """Of the taps."""
    classifier: HeadTwin | TensorTwin
    """The network's own, or its logits where it is no head."""
    ends: tuple[int, ...]
    which: frozenset[int]
    configs: tuple[tuple[tuple[HeadShape, str], LaunchConfig], ...]
    """How heads of some shapes are launched in some places."""

    def launch(self) -> object:
        """Launch such heads."""
        made = [_made(head) for head in self.heads]
        heads: list[ExitHead | None] = [one.head.as_exit_head() for one in made]
        inputs = [one.x for one in made]
        if isinstance(self.classifier, HeadTwin):
            classifier = _made(self.classifier)
            heads.append(classifier.head.as_exit_head())
            inputs.append(classifier.x)
        else:
            heads.append(None)
            inputs.append(self.classifier.made())
        with_probs = all(head.return_probs for head in self.heads)
        with overriding(dict(self.configs)):
            return launch_heads(heads, inputs, self.ends, self.which, with_probs=with_probs)
