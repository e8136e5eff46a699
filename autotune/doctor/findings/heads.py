"""Heads in the way of the trunk: those that a gate or a join waits for, and those that could be one launch."""

import bisect
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from ...measuring.cuda_calls import EVENT_RECORDS
from ...records.intervals import common, length
from ..trace import Stream, Trace, TracedRequest, Work
from .finding import Finding, first_few, found, marks_of, short_name, stream_name, us
from .host import host_waits
from .requests import captures, intervals, launched_in, library_streams, trunk_stream, where_any

#: Between a head's last kernel and the wait that asks for its answer there are at most so many, such as ``max() > t``.
_MOST_BETWEEN = 6
#: Less of a request is no finding.
_LEAST_US = 5.0
#: A head runs by itself if nothing runs beside it for at least this share of its time.
_ALONE_SHARE = 0.9
#: What a fused head takes: one launch, at most this on the device (ResNet-18, H200).
_FUSED_US = 5.0


class Gate(NamedTuple):
    """Kernels that the trunk waits for before it goes on, and how it is made to."""

    work: tuple[Work, ...]
    how: str
    alone_us: float
    """How long they run with nothing beside them."""

    @property
    def head(self) -> str:
        """The head's name, or its kernels'."""
        return next((one.call.head for one in self.work if one.call and one.call.head), short_name(self.work[-1]))


def _alone_us(work: Collection[Work], request: TracedRequest) -> float:
    ours = {id(one) for one in work}
    others = intervals(one for one in request.kernels if id(one) not in ours)
    mine = intervals(work)
    return length(mine) - length(common(mine, others))


def asked_gates(request: TracedRequest) -> Iterator[Gate]:
    """Yield annotated heads whose answer the host waits for before it launches the rest."""
    launched = [(work, work.call) for work in launched_in(request).work if work.kind == "kernel" and work.call]
    asked: set[int] = set()  # indices of heads' last kernels: the first wait behind each asks
    for wait in host_waits(request):
        before = bisect.bisect_left(launched, wait.start_us, key=lambda pair: pair[1].start_us)
        last = next((index for index in reversed(range(before)) if launched[index][1].head is not None), None)
        if last is None or before - 1 - last > _MOST_BETWEEN or last in asked:
            continue
        first, name = last, launched[last][1].head
        while first and launched[first - 1][1].head == name:
            first -= 1
        work = tuple(work for work, _ in launched[first:before])
        asked.add(last)
        yield Gate(work, f"{wait.call.name} asks for its answer", _alone_us(work, request))


def joined_gates(trace: Trace, request: TracedRequest, trunk: Stream) -> Iterator[Gate]:
    """Yield kernels that fork from the trunk and are joined before the trunk is given more, which then comes after.

    The fork waits for all of the trunk so far: an event recorded behind the trunk's last launch. The work of the last
    segment may be joined so, and so may the run that warms up what is captured next.
    """
    launched = launched_in(request)
    kernels = [pair for pair in zip(launched.times, launched.work, strict=True) if pair[1].kind == "kernel"]
    trunk_times = [time for time, work in kernels if work.on == trunk]
    records = [call.start_us for call in request.calls if call.name in EVENT_RECORDS]
    for join in request.waits:
        index = bisect.bisect_left(trunk_times, join.start_us)
        if join.stream != trunk[1] or index in (0, len(trunk_times)) or not launched.goes_on(join.start_us):
            continue
        latest, following = trunk_times[index - 1], trunk_times[index]
        side = [work for time, work in kernels if latest <= time < join.start_us and work.on != trunk]
        forks = [
            wait.start_us
            for wait in request.waits
            if side and wait.stream == side[0].stream and latest < wait.start_us < join.start_us
        ]
        streams = {work.on for work in side}
        if (
            not forks
            or not any(latest < record <= forks[-1] for record in records)
            or len(streams) != 1
            or streams <= library_streams(request)
            or any(work.graph for work in side)
            or any(join.start_us <= begin < following for begin, _ in captures(request))
        ):
            continue
        names = stream_name(trace, *trunk), stream_name(trace, *side[0].on)
        how = f"{names[0]} waits for {names[1]} before it is given more"
        yield Gate(tuple(side), how, _alone_us(side, request))


def find_gate_waits(trace: Trace) -> Iterator[Finding]:
    """Find heads that the next segment waits for: asked for by the host, or joined as soon as they are forked."""
    trunk = trunk_stream(trace)

    @cache
    def gates(request: TracedRequest) -> list[Gate]:
        joined = joined_gates(trace, request, trunk) if trunk is not None else ()
        both = (*asked_gates(request), *joined)
        return [gate for gate in both if gate.alone_us >= _ALONE_SHARE * length(intervals(gate.work))]

    cost = trace.median_us(lambda request: sum(gate.alone_us for gate in gates(request)))
    if cost < _LEAST_US:
        return
    shown = where_any(trace, gates)
    yield found(
        "gate-waits",
        "A head is on the critical path: the next segment begins only when it has answered.",
        [f"{gate.head}: {us(gate.alone_us)} with nothing beside it, and {gate.how}" for gate in shown],
        cost,
        (work.call.line for gate in shown for work in gate.work if work.call is not None),
        marks_of(work for gate in gates(trace.shown) for work in gate.work),
    )


def find_fusible_heads(trace: Trace) -> Iterator[Finding]:
    """Find heads that could be one launch each, as the doctor told from the module."""
    heads = trace.seen.heads
    fusible = [head.name for head in heads if head.why_not is None]
    if not fusible:
        return

    def work_of(request: TracedRequest, name: str) -> list[Work]:
        return [work for work in request.kernels if work.call is not None and work.call.head == name]

    def saved_us(request: TracedRequest) -> float:
        """What fusing saves, on the device or of the host: whichever is more is what is waited for."""
        device = host = 0.0
        for name in fusible:
            work = work_of(request, name)
            device += max(0.0, sum(one.us for one in work) - _FUSED_US)
            host += sum(one.call.end_us - one.call.start_us for one in work[1:] if one.call is not None)
        return max(device, host)

    evidence = []
    for name in fusible:
        work = work_of(trace.shown, name)
        told = f": {len(work)} launches, {us(sum(one.us for one in work))} on the device" if work else ""
        evidence.append(f"{name}{told}")
    evidence += [f"{head.name} stays as it is: {head.why_not}" for head in heads if head.why_not is not None]
    count, names = len(fusible), repr(fusible[0] if len(fusible) == 1 else fusible)
    made = found(
        "fusible-heads",
        f"{count} head{'s' * (count > 1)} could be one launch each: {', '.join(first_few(fusible))}.",
        evidence,
        trace.median_us(saved_us) or None,
        marks=marks_of(work for name in fusible for work in work_of(trace.shown, name)),
    )
    yield replace(made, evidence=first_few(evidence, most=8), snippet=made.snippet.replace("{names}", names))
