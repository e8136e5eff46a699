"""``Captures``: all that a runner has on its device, freed once nothing uses it any more."""

from contextlib import suppress
from functools import cached_property
from typing import Any

import torch

from ...kernels.cuda.lifetimes import MemoryPool, empty_cache, is_forked, new_event
from ...kernels.cuda.runtime import beside_captures, new_stream
from ..trunk.branches import MOST_BESIDE

#: Pairs that no runner has now, by device and the trunk's priority, and their workspaces. They are kept: cuBLAS keeps
#: its workspace of a stream until somebody clears all of them.
_free: dict[tuple[torch.device, int], list["CaptureStreams"]] = {}


class CaptureStreams:
    """Streams of one runner's captures.

    A graph keeps the address of the workspace that cuBLAS has for the stream of the capture, so that two graphs which
    may run at the same time must come from different streams. A kernel keeps the priority of the stream that it was
    captured on; the side stream's is 0.
    """

    def __init__(self, device: torch.device, trunk_priority: int) -> None:
        """Make streams of ``device``, which is current."""
        self.trunk = new_stream(device, trunk_priority)
        self.side = new_stream(device, 0)
        self._kind = device, trunk_priority
        self._workspaces = MemoryPool(device)

    @cached_property
    def branches(self) -> list[torch.cuda.Stream]:
        """Carry branches of a trunk, which join its stream before anybody waits."""
        streams = [new_stream(*self._kind) for _ in range(MOST_BESIDE)]
        for stream in streams:
            self.allocate_workspaces(stream)
        return streams

    def allocate_workspaces(self, stream: torch.cuda.Stream) -> None:
        """Let cuBLAS allocate what it has for one of the streams in memory that lives as long as they.

        ``torch.compile`` with CUDA graphs clears all workspaces that cuBLAS has. From PyTorch's common memory they
        would then go to others while graphs write them. Heads that are modules, or that a library multiplies, call
        cuBLAS, too: which these are is known once they run.
        """
        with self._workspaces.allocating(), torch.cuda.stream(stream):
            for dtype in (torch.float32, torch.float16):  # with and without tensor cores
                ones = torch.ones(16, 16, dtype=dtype, device=stream.device)
                torch.addmm(ones[0], ones, ones)  # cuBLASLt
                torch.mm(ones, ones)

    def wait(self) -> None:
        """Let the host wait for all that was launched on them."""
        self.trunk.synchronize()
        self.side.synchronize()

    def give_back(self) -> None:
        """Let other runners have the streams; nothing captured on them may run any more."""
        _free[self._kind].insert(0, self)  # in front: the next runner finds their workspaces


def take_streams(device: torch.device, trunk_priority: int) -> CaptureStreams:
    """Take streams of ``device``, which is current, for one runner's captures as long as its graphs live."""
    free = _free.setdefault((device, trunk_priority), [])
    streams = free.pop(0) if free else CaptureStreams(device, trunk_priority)
    try:
        streams.allocate_workspaces(streams.trunk)
    except BaseException:  # no memory for all of them; cuBLAS would keep those that it has, for nobody
        streams.give_back()
        raise
    return streams


#: Of runners that went while an interrupt came: freed when the next runner is made.
_left_behind: list["Captures"] = []


class Captures:
    """What was captured for a runner, with its streams and memory.

    It is an object of its own, and knows no runner, so that it is whole when the collector finds a runner in garbage.
    """

    def __init__(self, device: torch.device, trunk_priority: int) -> None:
        """Take streams of ``device``, which is current, and memory."""
        while _left_behind:
            left = _left_behind[-1]
            left.free()
            _left_behind.remove(left)
        self.device = device
        self.batches: dict[int, Any] = {}
        """What was captured, by batch size."""
        self.done = new_event()
        """Recorded behind each request."""
        self.unneeded = new_event()
        """Recorded behind the graph that a request may have launched and not needed."""
        self.asking: torch.cuda.Stream | None = None
        """The stream of a request behind which that event is not recorded yet: under way, or interrupted."""
        empty_cache()  # while allocating from a pool the allocator does not do so itself
        self._memory: MemoryPool | None = MemoryPool(device)
        self._streams: CaptureStreams | None = take_streams(device, trunk_priority)

    @property
    def memory(self) -> MemoryPool:
        """Memory of the captures."""
        assert self._memory is not None
        return self._memory

    @property
    def streams(self) -> CaptureStreams:
        """Streams of the captures."""
        assert self._streams is not None
        return self._streams

    def record(self, stream: torch.cuda.Stream) -> None:
        """Record the end of a request, or what else may use the memory, on its stream."""
        self.done.record(stream)
        self.asking = None

    def catch_up(self) -> None:
        """Record what an interrupt has kept from being recorded."""
        if self.asking is not None:
            self.record(self.asking)

    def wait(self) -> None:
        """Let the host wait for all that is under way, and for nothing else."""
        self.catch_up()
        self.done.synchronize()
        self.streams.wait()

    def free(self) -> None:
        """Wait for what is under way, and for nothing else, and let all go; an interrupted wait frees nothing.

        In a forked child, which has nothing to free, it does nothing.
        """
        if self._streams is None or is_forked():
            return
        with torch.cuda.device(self.device), beside_captures():
            with suppress(RuntimeError):  # where the device is lost nothing is under way any more
                self.wait()
            self.batches.clear()
            self._memory = None
            streams, self._streams = self._streams, None
            streams.give_back()

    def free_or_leave(self) -> None:
        """Free all, or what an interrupt has left when the next runner is made."""
        try:
            self.free()
        except BaseException as error:  # interrupted; or the process ends
            _left_behind.append(self)
            if not isinstance(error, Exception):
                raise
