"""Memory by which the programs of a launch find each other: counters, or numbers that are 0 until they are there.

It is zero before a launch and set back to zero by the launch's programs, so that no launch needs a second one to clear
it. Two launches that may run at the same time never share any: launches on one stream share, because they run one after
another, and so do launches on one stream in one capture. What a capture takes it keeps for good, because its graph may
be replayed on any stream at any time: a few bytes, or what the programs of its largest head hand over.
"""

import threading

import torch
from torch import Tensor

_SHARED = 1 << 16  # numbers (256 KiB) of a stream, so that hardly a batch asks for more and clears memory on its way
_LINE = 32  # numbers (128 bytes) of a cache line: what a capture takes begins with one, so that all captures are alike
_RESERVE = 1 << 22  # numbers (16 MiB) kept ready for captures, which cannot clear memory without a launch of their own


class ArrivalCounters:
    """All counters of one device."""

    def __init__(self, device: torch.device) -> None:
        """Hold counters for ``device``; nothing is allocated before the first launch."""
        self._device = device
        self._by_stream: dict[int, Tensor] = {}
        self._reserve = torch.empty(0, dtype=torch.int32)
        self._given_away: list[Tensor] = []  # graphs hold addresses, not references
        self._by_capture: dict[int, tuple[int, Tensor]] = {}  # by stream the last capture, and what it has
        self._lock = threading.Lock()

    def take(self, count: int) -> Tensor:
        """Return ``count`` zeroed int32 counters for one launch on the current stream."""
        with self._lock:
            stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
            if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return self._take_for_good(count, stream, capture_on(stream))
            counters = self._by_stream.get(stream)
            if counters is None or counters.numel() < count:
                counters = self._zeros(max(count, _SHARED))
                self._by_stream[stream] = counters
            if self._device.type == "cuda" and self._reserve.numel() < _RESERVE // 2:
                self._given_away.append(self._reserve)
                self._reserve = self._zeros(_RESERVE)
                # A capture reads the reserve from whatever stream its graph is replayed on.
                torch.cuda.current_stream(self._device).synchronize()
            return counters[:count]

    def _take_for_good(self, count: int, stream: int, capture: int) -> Tensor:
        last, counters = self._by_capture.get(stream, (None, self._reserve[:0]))
        if last == capture and counters.numel() >= count:
            return counters[:count]
        if self._reserve.numel() < count:  # right, but the graph gets a node that clears them
            return self._zeros(count)
        counters, self._reserve = self._reserve[:count], self._reserve[-(-count // _LINE) * _LINE :]
        self._by_capture[stream] = capture, counters
        return counters

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._device)


def capture_on(stream: int) -> int:
    """Return CUDA's number of the capture that is under way on a stream; no two captures of a process have the same."""
    from cuda.bindings import runtime  # there is none where torch has no CUDA

    error, _status, number, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"the capture on the current stream: CUDA says {error.name}")
    return int(number)


_devices: dict[torch.device, ArrivalCounters] = {}


def arrival_counters(device: torch.device) -> ArrivalCounters:
    """Return the counters of ``device``, which must carry an index if it is a CUDA device."""
    return _devices.setdefault(device, ArrivalCounters(device))
