"""``Captures``: all that a runner has on its device, freed once nothing uses it any more; and who calls it."""

from contextlib import suppress

import torch

from ...kernels.cuda_runtime import beside_captures
from ...kernels.lifetimes import is_forked, new_event
from ...kernels.memory_pool import MemoryPool, empty_cache
from ..streams import CallersStream
from .capture_streams import CaptureStreams, take_streams
from .captured_batch import CapturedBatch

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
        self.batches: dict[int, CapturedBatch] = {}
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


class Callers:
    """Streams that requests come on, one after another."""

    def __init__(self, captures: Captures) -> None:
        """Begin with the current stream of the device, on which all was captured."""
        self._captures = captures
        self._latest = CallersStream(torch.cuda.current_stream(captures.device))

    @property
    def latest(self) -> torch.cuda.Stream:
        """That of the last request."""
        return self._latest.stream

    def current(self) -> torch.cuda.Stream:
        """Return the current stream, which then comes after the last request: that may still use the buffers."""
        if not self._latest.is_current():
            caller = torch.cuda.current_stream(self._captures.device)
            self._captures.catch_up()
            caller.wait_event(self._captures.done)
            self._latest = CallersStream(caller)
        return self._latest.stream
