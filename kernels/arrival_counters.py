"""ArrivalCounters: zeroed device memory by which the programs of a launch count and find each other.

It is zero before a launch and set back to zero by the launch's programs, so that no launch needs a second one to clear
it. Two launches that may run at the same time never share any: launches on one stream share, because they run one after
another, and so do launches on one stream in one capture. A capture keeps what it takes for good, because its graph may
be replayed on any stream at any time: a few bytes, or all that the programs of its largest head hand over.
"""

import threading

import torch
from torch import Tensor

#: int32 counters (256 KiB) of a stream: so many that hardly a batch asks for more, which takes a launch to clear.
_PER_STREAM = 1 << 16
#: int32 counters (128 bytes) of a cache line. A capture's begin with one, so that all captures are alike.
_LINE = 32
#: int32 counters (16 MiB) kept ready for captures, which cannot clear memory without a launch of their own.
_RESERVED = 1 << 22


class ArrivalCounters:
    """All counters of one device; safe to share between threads."""

    def __init__(self, device: torch.device) -> None:
        """Hold counters for ``device``; nothing is allocated before the first launch."""
        self._device = device
        self._by_stream: dict[int, Tensor] = {}
        self._reserve = torch.empty(0, dtype=torch.int32)
        self._kept: list[Tensor] = []  # used-up reserves: graphs hold addresses, not references
        self._by_capture: dict[int, tuple[int, Tensor]] = {}  # by stream: the last capture and its counters
        self._lock = threading.Lock()

    def take(self, count: int) -> Tensor:
        """Return ``count`` int32 counters, all 0, for one launch on the current stream, which sets them back to 0."""
        with self._lock:
            stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return self._take_for_capture(count, stream, capture_id(stream))
            counters = self._by_stream.get(stream)
            if counters is None or counters.numel() < count:
                counters = self._zeros(max(count, _PER_STREAM))
                self._by_stream[stream] = counters
            if self._device.type == "cuda" and self._reserve.numel() < _RESERVED // 2:
                self._kept.append(self._reserve)
                self._reserve = self._zeros(_RESERVED)
                # A capture reads the reserve from whatever stream its graph is replayed on.
                torch.cuda.current_stream(self._device).synchronize()
            return counters[:count]

    def _take_for_capture(self, count: int, stream: int, capture: int) -> Tensor:
        last, counters = self._by_capture.get(stream, (None, self._reserve[:0]))
        if last == capture and counters.numel() >= count:
            return counters[:count]
        if self._reserve.numel() < count:  # correct, but the graph gets a node that clears them
            return self._zeros(count)
        counters, self._reserve = self._reserve[:count], self._reserve[-(-count // _LINE) * _LINE :]
        self._by_capture[stream] = capture, counters
        return counters

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


def capture_id(stream: int) -> int:
    """Return CUDA's id, unique in the process, of the capture under way on a stream, given as its ``cuda_stream``."""
    from cuda.bindings import runtime  # not installed where torch has no CUDA

    error, _status, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"the capture on the current stream: CUDA says {error.name}")
    return int(number)


_devices: dict[torch.device, ArrivalCounters] = {}


def arrival_counters(device: torch.device) -> ArrivalCounters:
    """Return the counters of ``device``, the same object every time; a CUDA device must have an index."""
    return _devices.setdefault(device, ArrivalCounters(device))
