"""Kernels that fill the device, so that what is ready beside them has to wait."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from typing import Any, NamedTuple

from ...measuring.cuda_calls import EVENT_RECORDS
from ...records.intervals import common, length
from ..trace import Stream, Trace, TracedRequest, Work
from .finding import Finding, found, marks_of, short_name, us
from .requests import Busy, holds, intervals, launched_in, library_streams, set_up, trunk_stream, where_any

#: Of a launch until its kernel runs on an idle device, so that a kernel that begins later was held up.
_START_US = 5.0
#: Kernels that fill the device run for at least this share of the time that a kernel is held up.
_FULL_SHARE = 0.8
#: What runs beside nothing is a finding from this many microseconds, this share of the side's time.
_LEAST_US, _LEAST_SHARE = 10.0, 0.5


def fills(work: Work, trace: Trace) -> bool:
    """Tell whether a kernel has as many threads as all SMs hold; fewer may do, which take more registers or memory."""
    device = next((one for one in trace.devices if one.get("id", 0) == work.device), {})
    sms, threads = device.get("numSms"), device.get("maxThreadsPerMultiprocessor")
    if work.grid is None or work.block is None or not isinstance(sms, int) or not isinstance(threads, int):
        return False
    return prod(work.grid) * prod(work.block) >= sms * threads


class HeldUp(NamedTuple):
    """A kernel that was ready and ran only when the device had room."""

    work: Work
    ready_us: float
    behind: Work
    """The last kernel that kept it waiting."""


def _done_before(request: TracedRequest) -> Callable[[Stream, float], float]:
    """Return what tells when all is done that a stream was made to wait for before a launch on it."""
    launched = launched_in(request)
    times: dict[Stream, list[float]] = defaultdict(list)
    ends: dict[Stream, list[float]] = defaultdict(list)
    for time, work in zip(launched.times, launched.work, strict=True):
        times[work.on].append(time)
        ends[work.on].append(max([work.end_us, *ends[work.on][-1:]]))
    records = sorted(call.start_us for call in request.calls if call.name in EVENT_RECORDS)
    waits: dict[int, list[float]] = defaultdict(list)
    for wait in sorted(request.waits, key=lambda wait: wait.start_us):
        waits[wait.stream].append(wait.start_us)

    def until(stream: Stream, launched_us: float) -> float:
        index = bisect.bisect_left(waits[stream[1]], launched_us) - 1
        if index < 0:
            return 0.0
        waited = waits[stream[1]][index]
        record = bisect.bisect_right(records, waited) - 1
        recorded = records[record] if record >= 0 else waited
        counts = {other: bisect.bisect_left(begins, recorded) for other, begins in times.items() if other != stream}
        return max((ends[other][count - 1] for other, count in counts.items() if count), default=0.0)

    return until


def held_up(trace: Trace, request: TracedRequest, trunk: Stream) -> list[HeldUp]:
    """Return the kernels beside the trunk that were ready, and waited for trunk kernels that fill the device.

    Ready is what is launched, when its stream has done what came before, and when all is done that other streams were
    given before the event was recorded that its stream waits for. Kernels of graphs have an order that no trace tells.
    """
    others, libraries = set_up(request), library_streams(request)  # cuDNN tries its algorithms on streams of its own
    own = [work for work in request.kernels if work.call is not None and not work.graph and work.on not in libraries]
    kernels = sorted(
        (work for work in own if work.call and not holds(others, work.call.start_us)), key=lambda work: work.start_us
    )
    full = [work for work in kernels if work.on == trunk and fills(work, trace)]
    if not full or not request.waits:
        return []
    filled, begins, done_before = Busy(full), [work.start_us for work in full], _done_before(request)
    late: list[HeldUp] = []
    latest: dict[Stream, Work] = {}
    held: dict[Stream, HeldUp] = {}
    for work in kernels:
        stream, call = work.on, work.call
        before, chain = latest.get(stream), held.pop(stream, None)
        latest[stream] = work
        if stream == trunk or call is None:
            continue
        given = max(call.end_us, done_before(stream, call.start_us))
        if chain is not None and given <= chain.work.start_us:
            held[stream] = HeldUp(work, given, chain.behind)  # it waits for one that was held up
        else:
            ready = given if before is None else max(given, before.end_us)
            waited = work.start_us - ready
            if waited > _START_US and filled.between(ready, work.start_us) >= _FULL_SHARE * waited:
                held[stream] = HeldUp(work, ready, full[bisect.bisect_left(begins, work.start_us) - 1])
        if stream in held:
            late.append(held[stream])
    return late


def find_full_device(trace: Trace) -> Iterator[Finding]:
    """Find side kernels that run beside nothing, for the trunk's kernels fill the device while they are ready."""
    trunk = trunk_stream(trace)
    if trunk is None:
        return

    @cache
    def held(request: TracedRequest) -> list[HeldUp]:
        return held_up(trace, request, trunk)

    def alone_us(request: TracedRequest) -> float:
        side = intervals(one.work for one in held(request))
        return length(side) - length(common(side, intervals(work for work in request.kernels if work.on == trunk)))

    def shape(work: Work) -> tuple[Any, ...]:
        return work.name, work.grid, work.block

    least: dict[tuple[Any, ...], float] = {}  # a few blocks at a time beside others, a kernel crawls
    for work in (work for request in trace.requests for work in request.kernels):
        least[shape(work)] = min(work.us, least.get(shape(work), work.us))

    def side_us(request: TracedRequest) -> float:
        beside = [work for work in request.kernels if work.on != trunk]
        return min(length(intervals(beside)), sum(least[shape(work)] for work in beside))

    cost = trace.median_us(alone_us)
    if cost < _LEAST_US or cost < _LEAST_SHARE * trace.median_us(side_us):
        return
    yield found(
        "full-device",
        "The trunk's kernels fill all SMs, so that what is ready on the side stream runs after them.",
        [
            f"{short_name(one.work)} on stream {one.work.stream} was ready, waited "
            f"{us(one.work.start_us - one.ready_us)} and ran for {us(one.work.us)}, behind {short_name(one.behind)} "
            f"({prod(one.behind.grid or (0,)):,} blocks of {prod(one.behind.block or (0,))} threads)"
            for one in where_any(trace, held)
        ],
        cost,
        marks=marks_of(one.work for one in held(trace.shown)),
    )
