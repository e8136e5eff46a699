"""``SplitTrunk``: parts of a backbone on several devices of one process, run and captured as one on the first.

    first device:  part 0 -> features ..... <- features of part 1 <- features of part 2, logits
    second:                 `-> part 1 ....'                    |
    third:                             `-> part 2 ..............'

It is a trunk like any other: heads, answers and requests are on the first device, which stands still while the others
compute. A graph holds what all devices do, in the order of the streams' waits.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from weakref import finalize

import torch
from torch import Tensor, nn

from ...kernels.cuda.runtime import is_capturing
from ..basics.streams import has_streams
from ..runners.capture import copy_between
from ..runners.captures import Captures
from ..runners.graph_runner import GraphRunner
from .cut import Placed


class SplitTrunk(nn.Module):
    """Takes a batch on the first device and returns the logits there, with the outputs of taps at their names."""

    def __init__(
        self, parts: Sequence[Placed], devices: Sequence[torch.device], taps: Sequence[str], shape: torch.Size
    ) -> None:
        """Run parts on their devices, all of CUDA or all the CPU, for the backbone's taps and samples of a shape."""
        super().__init__()
        self.training = False  # layers of the users' stay in the mode that they have
        self._shape = shape
        self._placed, self._devices = [*parts], [*devices]
        self._parts = nn.ModuleList(placed.trunk.module for placed in parts)
        self._taps = [_identity_at(self, tap) for tap in taps]
        self._captures: dict[torch.device, Captures] = {}
        if has_streams(torch.empty(0, device=devices[0])):
            for device in dict.fromkeys(each for each in devices if each != devices[0]):
                with torch.cuda.device(device):
                    self._captures[device] = captures = Captures(device, GraphRunner.trunk_priority)
                    finalize(self, captures.free_or_leave).atexit = False

    def forward(self, x: Tensor) -> Tensor:
        """Run part after part, on each device's own stream, and on the current one of the first device."""
        if x.shape[1:] != self._shape:  # of which layers before a part may have read sizes
            raise ValueError(f"x: got shape {list(x.shape)}, wants [N, {', '.join(map(str, self._shape))}]")
        samples = len(x)
        going, at = _Pass(self._devices[0], self._captures, x), self._devices[0]
        for placed, device in zip(self._placed, self._devices, strict=True):
            x = going.bring(x, at, device)
            with going.on(device):
                x = x.contiguous(memory_format=placed.trunk.memory_format)
                x = placed.run(x, partial(self._tap_returned, going, placed, device))
            at = device
        if len(x) != samples:
            raise RuntimeError(
                f"network: answers for {len(x)} of {samples} samples in parts, as a forward does that runs a tap more "
                "than once: one that splits the batch itself, say"
            )
        return going.bring(x, at, self._devices[0])

    def _tap_returned(self, going: "_Pass", placed: Placed, device: torch.device, index: int, features: Tensor) -> None:
        """Hand on, on the first device, what a tap has returned."""
        features = going.bring(features, device, self._devices[0])
        with going.on(self._devices[0]):
            self._taps[placed.first_exit + index](features)
        going.follow_cut(device)


class _Pass:
    """One pass through all devices: their streams, and what has to stay until these have come together."""

    def __init__(self, first: torch.device, captures: Mapping[torch.device, Captures], x: Tensor) -> None:
        self._first, self._captures = first, captures
        self._home = torch.cuda.current_stream(first) if has_streams(x) else None
        self._kept: list[Tensor] = []  # what one stream allocates and another one reads
        self._allocating: set[torch.device] = set()

    def _stream(self, device: torch.device) -> "torch.cuda.Stream | None":
        return self._captures[device].streams.trunk if device in self._captures else self._home

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Run what is inside on a device's stream, and while that is captured in memory of its graphs."""
        with ExitStack() as stack:
            if device in self._captures.keys() - self._allocating and is_capturing(self._first):
                stack.enter_context(self._captures[device].memory.allocating())
                self._allocating.add(device)
                stack.callback(self._allocating.remove, device)
            if (stream := self._stream(device)) is not None:
                stack.enter_context(torch.cuda.stream(stream))
            yield

    def bring(self, x: Tensor, source: torch.device, device: torch.device) -> Tensor:
        """Return a tensor of one device on another, whose stream copies it."""
        if source == device:
            return x
        with self.on(source):
            x = x.resolve_conj().resolve_neg()
            if torch.empty_like(x, device="meta").stride() != x.stride():  # not all bytes are its own
                x = x.contiguous()
        stream, before = self._stream(device), self._stream(source)
        with self.on(device):
            there = torch.empty_like(x, device=device)
            if stream is None or before is None:
                return there.copy_(x)
            self._kept.append(x)
            stream.wait_stream(before)
            copy_between(there, x, stream)
        return there

    def follow_cut(self, device: torch.device) -> None:
        """Let a device's stream come after the first one's, if the graph has ended there and another one begun."""
        stream = self._captures[device].streams.trunk if device in self._captures else None
        if stream is not None and self._home is not None and is_capturing(self._first):
            with torch.cuda.stream(stream):
                began_anew = not is_capturing(device)
            if began_anew:
                stream.wait_stream(self._home)


def _identity_at(root: nn.Module, tap: str) -> nn.Module:
    """Return a layer of a tap's name, which returns what it is given."""
    for name in tap.split("."):
        if name not in root._modules:
            root.add_module(name, nn.Identity())
        root = root.get_submodule(name)
    return root
