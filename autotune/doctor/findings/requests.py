"""Requests in numbers: when the device is busy, what is launched after a time, what sets up; each told once."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import TypeVar

from ...measuring.cuda_calls import CAPTURE_BEGINS, INSTANTIATIONS, LAUNCHES, SYNCHRONISATIONS
from ...records.intervals import Interval, length, merged
from ..trace import ApiCall, Stream, Trace, TracedRequest, Work

Some = TypeVar("Some", bound=Sequence[object])

#: A request goes on after a time if this share of its kernels' time is still to come, or this share of their number.
_MUCH_TIME, _MUCH_WORK = 0.05, 0.1
#: Launches that torch.cuda.graph makes itself between the wait that it begins with and the capture: random states.
_LAUNCHES_BEFORE_CAPTURE = 4
#: So many waits for events, or for the device, in one convolution are trials.
_LEAST_TRIALS = 3


def where_any(trace: Trace, find: Callable[[TracedRequest], Some]) -> Some:
    """Return what is found in the shown request, or else in the first in which anything is."""
    results = [find(request) for request in (trace.shown, *trace.requests)]
    return next((some for some in results if some), results[0])


def steady_from_us(trace: Trace, request: TracedRequest) -> float:
    """Return from when on what is done in a request is done in every one: of one that may be the first, its half."""
    launching = sorted(work.call.start_us for work in request.work if work.call is not None)
    return 0.0 if trace.warm or not launching else launching[len(launching) // 2]


# The device.


def intervals(work: Iterable[Work]) -> list[Interval]:
    """Return the time during which any of it runs, as disjoint intervals."""
    return merged((one.start_us, one.end_us) for one in work)


@cache
def library_streams(request: TracedRequest) -> frozenset[Stream]:
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
        index = bisect.bisect_left(waits[work.stream], begin)
        return index < len(waits[work.stream]) and waits[work.stream][index] < end

    return frozenset({work.on for work in request.work} - {work.on for work in request.work if not waits_within(work)})


def trunk_stream(trace: Trace) -> Stream | None:
    """Return the stream with most kernel time, heads and libraries' own streams aside; None if nothing else ran."""
    by_stream: dict[Stream, float] = defaultdict(float)
    for request in trace.requests:
        for work in request.kernels:
            if not work.is_head and work.on not in library_streams(request):
                by_stream[work.on] += work.us
    return max(by_stream, key=by_stream.__getitem__, default=None)


class Busy:
    """When the device is busy with anything of some work."""

    def __init__(self, work: Iterable[Work]) -> None:
        """Look at work in any order."""
        self.intervals = intervals(work)
        self.us = length(self.intervals)
        """How long it is busy."""
        self._begins = [begin for begin, _ in self.intervals]
        self._before = [0.0, *accumulate(end - begin for begin, end in self.intervals)]

    def between(self, begin: float, end: float) -> float:
        """Return how long it is busy from one time to a later one."""
        return self._until(end) - self._until(begin)

    def _until(self, time: float) -> float:
        index = bisect.bisect_right(self._begins, time) - 1
        if index < 0:
            return 0.0
        begin, end = self.intervals[index]
        return self._before[index] + min(time, end) - begin


class Launched:
    """A request's work, in the order in which the host launched it."""

    def __init__(self, request: TracedRequest) -> None:
        """Look at what calls of this request launched."""
        pairs = [(work.call.start_us, work) for work in request.work if work.call is not None]
        pairs.sort(key=lambda pair: pair[0])
        self.times = [time for time, _ in pairs]
        self.work = [work for _, work in pairs]
        self._next_start = list(accumulate((work.start_us for work in reversed(self.work)), min))[::-1]
        self._kernel_us = [0.0, *accumulate(work.us if work.kind == "kernel" else 0.0 for work in self.work)]
        self._kernels = [0, *accumulate(int(work.kind == "kernel") for work in self.work)]

    def next_start(self, time: float) -> float | None:
        """Return when the device first starts any work that is launched from ``time`` on; None: there is none."""
        index = bisect.bisect_left(self.times, time)
        return self._next_start[index] if index < len(self.work) else None

    def kernels_before(self, time: float) -> int:
        """Return how many kernels are launched before a time."""
        return self._kernels[bisect.bisect_left(self.times, time)]

    def goes_on(self, time: float) -> bool:
        """Tell whether the request has much to run after a time: not only what puts an answer into shape."""
        index = bisect.bisect_left(self.times, time)
        more, all_us = self._kernel_us[-1] - self._kernel_us[index], self._kernel_us[-1]
        count, all_kernels = self._kernels[-1] - self._kernels[index], self._kernels[-1]
        return count > 0 and (more >= _MUCH_TIME * all_us or count >= _MUCH_WORK * all_kernels)


launched_in = cache(Launched)


# Stretches in which the host sets something up.


@cache
def captures(request: TracedRequest) -> list[Interval]:
    """Return when graphs are captured or instantiated, with the wait that torch.cuda.graph begins with."""
    found: list[Interval] = []
    begin: float | None = None
    waited: float | None = None
    launches = 0
    for call in request.calls:
        if call.name in CAPTURE_BEGINS:
            if begin is None:
                near = waited is not None and launches <= _LAUNCHES_BEFORE_CAPTURE
                begin = waited if near else call.start_us
        elif call.name in INSTANTIATIONS:
            found.append((call.start_us if begin is None else begin, call.end_us))
            begin = waited = None
        elif call.name in ("cudaDeviceSynchronize", "cuCtxSynchronize"):
            waited, launches = call.start_us, 0
        launches += call.name in LAUNCHES
    return merged(found)


@cache
def trials(request: TracedRequest) -> dict[Interval, list[ApiCall]]:
    """Return the convolutions, by begin and end, in which cuDNN measures its algorithms, with their calls."""
    by_operator: dict[Interval, list[ApiCall]] = defaultdict(list)
    for call in request.calls:
        if call.operator is not None and call.operator_us is not None and "convolution" in call.operator:
            by_operator[call.operator_us].append(call)

    def waits(calls: list[ApiCall]) -> int:
        return max(Counter(call.name for call in calls if call.name in SYNCHRONISATIONS).values(), default=0)

    return {span: calls for span, calls in by_operator.items() if waits(calls) >= _LEAST_TRIALS}


@cache
def set_up(request: TracedRequest) -> list[Interval]:
    """Return both, in which waits and allocations are theirs."""
    return merged([*captures(request), *trials(request)])


def holds(stretches: Sequence[Interval], time: float) -> bool:
    """Tell whether a time lies in one of disjoint stretches in order."""
    index = bisect.bisect_right(stretches, (time, float("inf"))) - 1
    return index >= 0 and time < stretches[index][1]
