"""The device's side of a request: when it is busy, which kernels are the trunk's, what is launched after a time."""

import bisect
from collections import defaultdict
from itertools import accumulate

from ...records.intervals import Interval, length, merged
from ..trace import Request, Trace, Work

#: A request goes on after a time if this share of its kernels' time is still to come, or this share of their number.
_MUCH_TIME, _MUCH_WORK = 0.05, 0.1

#: A device and the number of a stream on it.
Stream = tuple[int, int]


def stream_of(work: Work) -> Stream:
    """Return where it runs."""
    return work.device, work.stream


def library_streams(request: Request) -> set[Stream]:
    """Return the streams that a library has for itself, as cuDNN's algorithms have that run on several.

    All that they run is launched within operators that have them wait for the stream of their caller.
    """
    waits: dict[int, list[float]] = defaultdict(list)
    for start, stream in sorted((wait.start_us, wait.stream) for wait in request.waits):
        waits[stream].append(start)

    def waits_within(work: Work) -> bool:
        if work.call is None or work.call.operator_us is None:
            return False
        begin, end = work.call.operator_us
        of_stream = waits[work.stream]
        index = bisect.bisect_left(of_stream, begin)
        return index < len(of_stream) and of_stream[index] < end

    found: dict[Stream, bool] = {}
    for work in request.work:
        found[stream_of(work)] = found.get(stream_of(work), True) and waits_within(work)
    return {stream for stream, is_own in found.items() if is_own}


def kernels(request: Request) -> list[Work]:
    """Return what is no copy and no fill."""
    return [work for work in request.work if work.kind == "kernel"]


def intervals(work: list[Work]) -> list[Interval]:
    """Return the time during which any of it runs, as disjoint intervals."""
    return merged((one.start_us, one.end_us) for one in work)


def trunk_stream(trace: Trace) -> Stream | None:
    """Return the stream with most kernel time, heads and libraries' own streams aside; None if nothing else ran."""
    by_stream: dict[Stream, float] = defaultdict(float)
    for request in trace.requests:
        own = library_streams(request)
        for work in kernels(request):
            if not work.is_head and stream_of(work) not in own:
                by_stream[stream_of(work)] += work.us
    return max(by_stream, key=lambda stream: by_stream[stream], default=None)


class Busy:
    """When the device is busy with anything."""

    def __init__(self, work: list[Work]) -> None:
        """Look at work in any order."""
        self.intervals = intervals(work)
        self._begins = [begin for begin, _ in self.intervals]
        self._before = [0.0, *accumulate(end - begin for begin, end in self.intervals)]

    def until(self, time: float) -> float:
        """Return how long it is busy before a time."""
        index = bisect.bisect_right(self._begins, time) - 1
        if index < 0:
            return 0.0
        begin, end = self.intervals[index]
        return self._before[index] + min(time, end) - begin

    def idle(self, begin: float, end: float) -> float:
        """Return how long it is idle from one time to another."""
        return max(0.0, end - begin - (self.until(end) - self.until(begin)))

    def gaps(self) -> list[Interval]:
        """Return the pauses between its first and its last work."""
        return [(before[1], after[0]) for before, after in zip(self.intervals, self.intervals[1:], strict=False)]

    @property
    def us(self) -> float:
        """How long it is busy."""
        return length(self.intervals)


class Launched:
    """Work by when the host launched it."""

    def __init__(self, request: Request) -> None:
        """Look at what calls of this request launched."""
        ordered = sorted(
            ((work.call.start_us, work) for work in request.work if work.call is not None), key=lambda pair: pair[0]
        )
        self.times = [time for time, _ in ordered]
        self.work = [work for _, work in ordered]
        starts = [work.start_us for work in self.work]
        self._next_start = list(accumulate(reversed(starts), min))[::-1]
        on_kernels = [work.us if work.kind == "kernel" else 0.0 for work in self.work]
        self._kernel_us = [0.0, *accumulate(on_kernels)]
        self._kernels = [0, *accumulate(int(work.kind == "kernel") for work in self.work)]

    def next_start(self, time: float) -> float | None:
        """Return when the device first starts any work that is launched from ``time`` on; None: there is none."""
        index = bisect.bisect_left(self.times, time)
        return self._next_start[index] if index < len(self.work) else None

    def before(self, time: float) -> list[Work]:
        """Return what is launched before a time, in that order."""
        return self.work[: bisect.bisect_left(self.times, time)]

    def kernels_before(self, time: float) -> int:
        """Return how many kernels are launched before a time."""
        return self._kernels[bisect.bisect_left(self.times, time)]

    def goes_on(self, time: float) -> bool:
        """Tell whether the request has much to run after a time: not only what puts an answer into shape."""
        index = bisect.bisect_left(self.times, time)
        more, all_us = self._kernel_us[-1] - self._kernel_us[index], self._kernel_us[-1]
        count, all_kernels = self._kernels[-1] - self._kernels[index], self._kernels[-1]
        return count > 0 and (more >= _MUCH_TIME * all_us or count >= _MUCH_WORK * all_kernels)
