"""``PartStreams``: what a part of a network has on its GPU: streams, one of them for copies, memory and events."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import permutations

import torch

from ....kernels.cuda_runtime import beside_captures, new_stream
from ....kernels.lifetimes import new_event
from ...runners.captures import Captures
from .part import Part

#: That of a trunk's graphs: see GraphRunner.
_PRIORITY = -1
#: Streams for copies that no part has now, by device.
_free: dict[torch.device, list[torch.cuda.Stream]] = {}


class PartStreams:
    """Streams of one part, for all batch sizes, and the events by which parts wait for each other."""

    def __init__(self, part: Part) -> None:
        """Take streams and memory of the part's device."""
        self.part, self.device = part, part.device
        with torch.cuda.device(self.device):
            self.captures = Captures(self.device, _PRIORITY)
            streams = self.captures.streams
            self.trunk, self.side = streams.trunk, streams.side
            free = _free.setdefault(self.device, [])
            self.copies = free.pop() if free else new_stream(self.device, _PRIORITY)
            """Carries activations and answers to the next part's device."""
        self.computed = new_event()
        """Behind the latest graph of the trunk."""
        self.handed = new_event()
        """Behind the latest copies of activations to the next part."""
        self.judged = new_event()
        """Behind the latest launch of the heads that run once the part's trunk is done."""
        self.told = new_event()
        """Behind the latest copies of answers to the next part, which come last."""

    def allocate_workspaces(self) -> None:
        """Let cuBLAS have workspaces for the side stream, where heads are modules."""
        with torch.cuda.device(self.device):
            self.captures.streams.allocate_workspaces(self.side)

    def wait(self) -> None:
        """Let the host wait for all that is under way."""
        with torch.cuda.device(self.device):
            self.captures.wait()
            self.copies.synchronize()

    def free(self) -> None:
        """Free memory, once nothing is under way on any part, and let others have the streams."""
        self.captures.free_or_leave()
        _free.setdefault(self.device, []).append(self.copies)


class AllStreams:
    """Those of all parts, freed together: each may be copying to another one.

    It knows no runner, so that it is whole when the collector finds a runner in garbage.
    """

    def __init__(self) -> None:
        self.parts: list[PartStreams] = []

    def take(self, parts: Sequence[Part]) -> None:
        """Take streams for parts; what was taken is freed by ``free``, after an error, too."""
        for part in parts:
            self.parts.append(PartStreams(part))

    def wait(self) -> None:
        """Let the host wait for all that is under way."""
        with beside_captures():
            for one in self.parts:
                one.wait()

    def free(self) -> None:
        """Wait for what is under way and free all; an interrupted wait frees nothing. Doing it twice is fine."""
        if self.parts:
            with suppress(RuntimeError):  # where a device is lost nothing is under way any more
                self.wait()
            parts, self.parts = self.parts, []
            for one in parts:
                one.free()

    def free_or_leave(self) -> None:
        """Free all, or leave what was captured until the next runner is made, if an interrupt comes."""
        try:
            self.free()
        finally:
            for one in self.parts:
                one.captures.free_or_leave()


def wait_for_current_streams(devices: Iterable[torch.device]) -> None:
    """Let the host wait for the current stream of each device: streams of parts may then use what it has written."""
    for device in {*devices}:
        torch.cuda.current_stream(device).synchronize()


def reach_each_other(devices: Iterable[torch.device]) -> None:
    """Let devices copy from each other without the host in between, where they can; PyTorch does so at a first copy."""
    for source, target in permutations({*devices}, 2):
        torch.zeros(1, device=source).to(target)
