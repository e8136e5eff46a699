"""Plans: calls of one head that were checked and chosen once, to be made again with other inputs of the same layout."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .choose_config import overrides
from .cpu_head import cpu_head
from .driver_launch import are_launches_watched
from .head_output import HeadOutput
from .noted_launch import NotedLaunch
from .residency import is_recording


class HeadPlan(Protocol):
    """A head's call for one layout of its input."""

    def __call__(self, x: Tensor) -> HeadOutput:
        """Answer as ``fused_head`` does, bit for bit; nothing is checked."""


class CpuPlan:
    """A call on the CPU, where Triton does not run."""

    def __init__(self, *tensors: Any, **options: Any) -> None:
        """Repeat calls with these arguments of ``cpu_head``, that come after x."""
        self._tensors, self._options = tensors, options

    def __call__(self, x: Tensor) -> HeadOutput:
        """Compute in PyTorch's operations."""
        return cpu_head(x, *self._tensors, **self._options)


#: Workspace of the kernel: 0 before a launch and after it, or of no interest outside of it.
_WORKSPACE = ("features", "partial", "arrived", "tickets")


class LaunchPlan:
    """A launch of the kernel on one stream, whose launches share its workspace, as they run one after another."""

    def __init__(self, noted: NotedLaunch, x: Tensor, stream: int) -> None:
        """Repeat a launch that was made for an input like x on a stream, given by its handle."""
        given = noted.given()
        self._samples, self._classes = len(x), given["CLASSES"]
        self._with_probs = given["probs"] is not None
        # Tensors to make others like: torch.empty takes twice the time, since it looks for the device.
        self._floats, self._ints, self._bools = (
            torch.empty(1, dtype=dtype, device=x.device) for dtype in (torch.float32, torch.int64, torch.bool)
        )
        self._of: Callable[[Tensor], Any] = Tensor.data_ptr if noted.compiled else lambda tensor: tensor
        varying = ("x", "label", "confidence", "exits", *(("probs",) if self._with_probs else ()))
        self._repeat = noted.repeat([(name,) for name in varying], stream)
        self._workspace = [*(given[name] for name in _WORKSPACE), given["last"]]

    def __call__(self, x: Tensor) -> HeadOutput:
        """Launch on the stream, which is current; the tensors lie where those of the noted launch did."""
        samples = self._samples
        probs = self._floats.new_empty((samples, self._classes)) if self._with_probs else None
        label = self._ints.new_empty(samples)
        confidence = self._floats.new_empty(samples)
        exits = self._bools.new_empty(samples)
        given = (x, label, confidence, exits) if probs is None else (x, label, confidence, exits, probs)
        self._repeat([*map(self._of, given)])
        return HeadOutput(probs, label, confidence, exits)


def is_followed() -> bool:
    """Return whether anybody follows or changes what operations do: a mode, a transform, a tracer, an override.

    Autograd and autocast, which depend on the tensors, are not asked.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or overrides.get() is not None
        or is_recording()
        or are_launches_watched()
    )
