"""ArrivalCounters: a launch's zeroed device memory, for its programs' counters and the numbers that they send.

It is zero before a launch and set back to zero by the launch's programs, so that no launch needs a second one to clear
it. Two launches that may run at the same time never share any: launches on one stream share, because they run one after
another, and so do launches on one stream in one capture. A capture keeps what it takes for good, because its graph may
be replayed on any stream at any time: a few bytes, or all that the programs of its largest head hand over.
"""

import threading
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cuda.lifetimes import MemoryPool, new_event
from ..cuda.runtime import beside_captures, capture_id, is_capturing, may_be_destroyed, stream_number

#: int32 counters, or numbers that are handed over (256 KiB), of a stream; for more it gets others, cleared by a launch.
_PER_STREAM = 1 << 16
#: int32 counters (128 bytes) of a cache line. A capture's begin with one, so that all captures are alike.
_LINE = 32
#: int32 counters (16 MiB) kept ready for captures, which cannot clear memory without a launch of their own.
_RESERVED = 1 << 22


@dataclass
class _ForeignStream:
    """A stream whose owner, not PyTorch, may destroy it; its handle may then be another's, even one of PyTorch's."""

    number: int  # CUDA's, which no other stream of the process ever has
    launched: torch.cuda.Event  # recorded behind the last launch
    being_launched: int = 0  # launches for which counters were taken, and behind which the event is not recorded yet

    def is_idle(self) -> bool:
        """Return whether all launches are over, and so the counters zero."""
        return not self.being_launched and self.launched.query()


class ArrivalCounters:
    """All counters of one device; safe to share between threads."""

    def __init__(self, device: torch.device) -> None:
        """Hold counters for ``device``; nothing is allocated before the first launch."""
        self._device = device
        self._by_stream: dict[int, Tensor] = {}
        self._foreign: dict[int, _ForeignStream] = {}
        self._reserve = torch.empty(0, dtype=torch.int32)
        self._kept: list[Tensor] = []  # used-up reserves: graphs hold addresses, not references
        self._by_capture: dict[int, tuple[int | None, Tensor]] = {}  # by stream: the last capture and its counters
        self._lock = threading.Lock()
        self._memory: MemoryPool | None = None

    def take(self, count: int) -> Tensor:
        """Return ``count`` int32 counters, all 0, for one launch on the current stream, which sets them back to 0."""
        with self._lock:
            if self._device.type != "cuda":
                return self._of_stream(0, count)
            stream = torch.cuda.current_stream(self._device)
            handle = stream.cuda_stream
            if is_capturing(self._device):
                return self._take_for_capture(count, handle, capture_id(handle))
            if handle in self._foreign or (may_be_destroyed(stream) and handle not in self._by_stream):
                self._wait_for_namesake(stream)  # PyTorch's may have its handle by now; it may be one of those already
            counters = self._of_stream(handle, count)
            if self._reserve.numel() < _RESERVED // 2:
                reserve = self._zeros(_RESERVED)
                with beside_captures():  # a capture reads the reserve from whatever stream its graph is replayed on
                    stream.synchronize()
                self._kept.append(self._reserve)
                self._reserve = reserve
            return counters

    def launched(self) -> None:
        """Note that the launch for which counters were taken on the current stream is under way."""
        if self._foreign and not is_capturing(self._device):
            stream = torch.cuda.current_stream(self._device)
            with self._lock:
                foreign = self._foreign.get(stream.cuda_stream)
                if foreign is not None:
                    foreign.launched.record(stream)
                    foreign.being_launched -= 1

    def are_kept(self, handle: int) -> bool:
        """Return whether those of a stream, which had a launch, are its own as long as the process lives."""
        return handle in self._by_stream and handle not in self._foreign

    def _of_stream(self, handle: int, count: int) -> Tensor:
        counters = self._by_stream.get(handle)
        if counters is None or counters.numel() < count:
            if counters is not None and handle in self._foreign:
                self._kept.append(counters)  # they may be another stream's memory, and would go back to that
            counters = self._zeros(max(1 << (count - 1).bit_length(), _PER_STREAM))
            self._by_stream[handle] = counters
        return counters[:count]

    def _wait_for_namesake(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for a destroyed one of the same handle, whose launches may still be under way."""
        number = stream_number(stream.cuda_stream)
        known = self._foreign.get(stream.cuda_stream)
        if known is None or known.number != number:
            if known is not None:
                stream.wait_event(known.launched)
            else:
                self._take_over(stream.cuda_stream)
            self._foreign[stream.cuda_stream] = known = _ForeignStream(number, new_event())
        known.being_launched += 1

    def _take_over(self, handle: int) -> None:
        """Give a new stream the counters of one that is idle: it may be destroyed, and nobody tells of that."""
        with beside_captures():
            idle = next((other for other, foreign in self._foreign.items() if foreign.is_idle()), None)
        if idle is not None:
            self._by_stream[handle] = self._by_stream.pop(idle)
            del self._foreign[idle]

    def _take_for_capture(self, count: int, stream: int, capture: int | None) -> Tensor:
        last, counters = self._by_capture.get(stream, (None, self._reserve[:0]))
        if last == capture and counters.numel() >= count:
            return counters[:count]
        if self._reserve.numel() < count:  # correct, but the graph gets a node that clears them
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        counters, self._reserve = self._reserve[:count], self._reserve[-(-count // _LINE) * _LINE :]
        self._by_capture[stream] = capture, counters
        return counters

    def _zeros(self, count: int) -> Tensor:
        """Allocate counters in a pool of their own: that of whoever launches, a graph's say, may go before them."""
        if self._device.type != "cuda":
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        if self._memory is None and torch.cuda.get_allocator_backend() == "native":
            self._memory = MemoryPool(self._device)
        with beside_captures(), nullcontext() if self._memory is None else self._memory.allocating():
            return torch.zeros(count, dtype=torch.int32, device=self._device)


_devices: dict[torch.device, ArrivalCounters] = {}


def arrival_counters(device: torch.device) -> ArrivalCounters:
    """Return the counters of ``device``, the same object every time; a CUDA device must have an index."""
    return _devices.get(device) or _devices.setdefault(device, ArrivalCounters(device))
