"""Kernels that fill the device, so that what is ready beside them has to wait."""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from ...measuring.cuda_calls import EVENT_RECORDS
from ...records.intervals import common, length
from ..trace import Stream, Trace, TracedRequest, Work
from .finding import Finding, first_few, marks_of, short_name, us
from .requests import Busy, Launched, holds, intervals, library_streams, set_up, trunk_stream

#: Of a launch until its kernel runs on an idle device, so that a kernel that begins later was held up.
_START_US = 5.0
#: Kernels that fill the device run for at least this share of the time that a kernel is held up.
_FULL_SHARE = 0.8
#: What runs beside nothing is a finding from this many microseconds, this share of the side's time.
_LEAST_US, _LEAST_SHARE = 10.0, 0.5
#: Resident blocks that an SM has at most, and what one takes of its shared memory for itself.
_MOST_BLOCKS, _RESERVED_BYTES = 32, 1024
_REGISTERS_OF_A_WARP = 256
"""Registers are given to warps in multiples of it."""


def resident_blocks(work: Work, device: Mapping[str, Any]) -> int | None:
    """Return how many blocks of a kernel an SM holds at once; None where the trace does not say."""
    names = ("maxThreadsPerMultiprocessor", "regsPerMultiprocessor", "sharedMemPerMultiprocessor")
    limits = [device.get(name) for name in names]
    if work.block is None or work.registers is None or not all(isinstance(limit, int) for limit in limits):
        return None
    threads, registers, shared = map(int, limits)  # type: ignore[arg-type]
    x, y, z = work.block
    warps = -(-x * y * z // 32)
    if warps <= 0:
        return None
    of_warp = -(-max(work.registers, 1) * 32 // _REGISTERS_OF_A_WARP) * _REGISTERS_OF_A_WARP
    by_shared = shared // ((work.shared_bytes or 0) + _RESERVED_BYTES)
    return max(1, min(_MOST_BLOCKS, threads // (32 * warps), registers // (of_warp * warps), by_shared))


def fills(work: Work, trace: Trace) -> bool:
    """Tell whether a kernel has enough blocks for all SMs to be full of them."""
    device = next((one for one in trace.devices if one.get("id", 0) == work.device), None)
    if device is None or work.grid is None or not isinstance(device.get("numSms"), int):
        return False
    blocks = resident_blocks(work, device)
    x, y, z = work.grid
    return blocks is not None and x * y * z >= device["numSms"] * blocks


class HeldUp(NamedTuple):
    """A kernel that was ready and ran only when the device had room."""

    work: Work
    ready_us: float
    behind: Work
    """The last kernel that kept it waiting."""


class _Waits:
    """When streams have done what other streams have them wait for."""

    def __init__(self, request: TracedRequest) -> None:
        launched = Launched(request)
        by_stream: dict[Stream, list[tuple[float, float]]] = defaultdict(list)
        for time, work in zip(launched.times, launched.work, strict=True):
            by_stream[work.on].append((time, work.end_us))
        self._launched = {stream: [time for time, _ in pairs] for stream, pairs in by_stream.items()}
        self._ends = {stream: list(accumulate((end for _, end in pairs), max)) for stream, pairs in by_stream.items()}
        self._records = sorted(call.start_us for call in request.calls if call.name in EVENT_RECORDS)
        self._times: dict[int, list[float]] = defaultdict(list)
        for wait in sorted(request.waits, key=lambda wait: wait.start_us):
            self._times[wait.stream].append(wait.start_us)

    def until(self, stream: Stream, launched_us: float) -> float:
        """Return when all is done that a stream was made to wait for before a launch on it."""
        times = self._times[stream[1]]
        index = bisect.bisect_left(times, launched_us) - 1
        if index < 0:
            return 0.0
        record = bisect.bisect_right(self._records, times[index]) - 1
        recorded = self._records[record] if record >= 0 else times[index]
        done = 0.0
        for other, launched in self._launched.items():
            count = bisect.bisect_left(launched, recorded)
            if other != stream and count:
                done = max(done, self._ends[other][count - 1])
        return done


def held_up(trace: Trace, request: TracedRequest, trunk: Stream) -> list[HeldUp]:
    """Return the kernels beside the trunk that were ready, and waited for trunk kernels that fill the device.

    Ready is what is launched, when its stream has done what came before, and when all is done that other streams were
    given before the event was recorded that its stream waits for. Kernels of graphs have an order that no trace tells.
    """
    others, libraries = set_up(request), library_streams(request)  # cuDNN tries its algorithms on streams of its own
    all_kernels = sorted(
        (
            work
            for work in request.kernels
            if work.call is not None
            and not work.graph
            and work.on not in libraries
            and not holds(others, work.call.start_us)
        ),
        key=lambda work: work.start_us,
    )
    full = [work for work in all_kernels if work.on == trunk and fills(work, trace)]
    if not full or not request.waits:
        return []
    filled, begins, waits = Busy(full), [work.start_us for work in full], _Waits(request)
    found: list[HeldUp] = []
    latest: dict[Stream, Work] = {}
    held: dict[Stream, HeldUp] = {}
    for work in all_kernels:
        stream, call = work.on, work.call
        before, chain = latest.get(stream), held.pop(stream, None)
        latest[stream] = work
        if stream == trunk or call is None:
            continue
        given = max(call.end_us, waits.until(stream, call.start_us))
        if chain is not None and given <= chain.work.start_us:
            held[stream] = HeldUp(work, given, chain.behind)  # it waits for one that was held up
        else:
            ready = given if before is None else max(given, before.end_us)
            late = work.start_us - ready
            if late > _START_US and filled.between(ready, work.start_us) >= _FULL_SHARE * late:
                held[stream] = HeldUp(work, ready, full[bisect.bisect_left(begins, work.start_us) - 1])
        if stream in held:
            found.append(held[stream])
    return found


def _shape(work: Work) -> tuple[Any, ...]:
    return work.name, work.grid, work.block


def _least_us(trace: Trace) -> dict[tuple[Any, ...], float]:
    """Return how long each kernel takes where it takes least: a few blocks at a time beside others it crawls."""
    found: dict[tuple[Any, ...], float] = {}
    for request in trace.requests:
        for work in request.kernels:
            found[_shape(work)] = min(work.us, found.get(_shape(work), work.us))
    return found


def find_full_device(trace: Trace) -> Iterator[Finding]:
    """Find side kernels that run beside nothing, for the trunk's kernels fill the device while they are ready."""
    trunk = trunk_stream(trace)
    if trunk is None:
        return
    held = {id(request): held_up(trace, request, trunk) for request in trace.requests}

    def alone_us(request: TracedRequest) -> float:
        side = intervals([one.work for one in held[id(request)]])
        beside = common(side, intervals([work for work in request.kernels if work.on == trunk]))
        return length(side) - length(beside)

    least = _least_us(trace)

    def side_us(request: TracedRequest) -> float:
        beside = [work for work in request.kernels if work.on != trunk]
        return min(length(intervals(beside)), sum(least[_shape(work)] for work in beside))

    cost = trace.median_us(alone_us)
    if cost < _LEAST_US or cost < _LEAST_SHARE * trace.median_us(side_us):
        return
    request = trace.shown
    shown = held[id(request)] or next(found for found in held.values() if found)
    evidence = [
        f"{short_name(one.work)} on stream {one.work.stream} was ready, waited {us(one.work.start_us - one.ready_us)} "
        f"and ran for {us(one.work.us)}, behind {short_name(one.behind)} {_size(one.behind)}"
        for one in shown
    ]
    yield Finding(
        kind="full-device",
        what="The trunk's kernels fill all SMs, so that what is ready on the side stream runs after them.",
        evidence=first_few(evidence),
        remedy="No stream makes room on a full device: make the side's work smaller (one launch a head), or run it "
        "where the trunk is small, behind later layers or at smaller batches.",
        snippet="from auxhead.model import fuse_aux_heads\n\n"
        "report = fuse_aux_heads(model)  # each head one launch of a few blocks\n"
        "print(report.replaced.keys(), report.left_alone)\n",
        cost_us=cost,
        marks=marks_of(one.work for one in held[id(request)]),
    )


def _size(work: Work) -> str:
    x, y, z = work.grid or (0, 0, 0)
    a, b, c = work.block or (0, 0, 0)
    return f"({x * y * z:,} blocks of {a * b * c} threads)"
