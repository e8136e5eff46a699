"""Heads in the way of the trunk: those that a gate or a join waits for, and those that could be one launch."""

import bisect
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ...measuring.cuda_calls import EVENT_RECORDS
from ...records.intervals import common, length
from ..trace import Stream, Trace, TracedRequest, Work
from .finding import Finding, first_few, lines_of, marks_of, once_each, short_name, stream_name, us
from .host import host_waits
from .requests import Launched, captures, intervals, library_streams, trunk_stream

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
    others = intervals([one for one in request.kernels if id(one) not in ours])
    mine = intervals(work)
    return length(mine) - length(common(mine, others))


def asked_gates(request: TracedRequest) -> list[Gate]:
    """Return annotated heads whose answer the host waits for before it launches the rest."""
    launched = [(work, work.call) for work in Launched(request).work if work.kind == "kernel" and work.call is not None]
    found: dict[int, Gate] = {}  # by the index of the head's last kernel: the first wait behind it asks
    for wait in host_waits(request):
        before = bisect.bisect_left(launched, wait.start_us, key=lambda pair: pair[1].start_us)
        last = next((index for index in reversed(range(before)) if launched[index][1].head is not None), None)
        if last is None or before - 1 - last > _MOST_BETWEEN or last in found:
            continue
        first, name = last, launched[last][1].head
        while first and launched[first - 1][1].head == name:
            first -= 1
        work = tuple(work for work, _ in launched[first:before])
        found[last] = Gate(work, f"{wait.call.name} asks for its answer", _alone_us(work, request))
    return list(found.values())


def joined_gates(trace: Trace, request: TracedRequest, trunk: Stream) -> list[Gate]:
    """Return kernels that fork from the trunk and are joined before the trunk is given more, which then comes after.

    The fork waits for all of the trunk so far: an event recorded behind the trunk's last launch. The work of the last
    segment may be joined so, and so may the run that warms up what is captured next.
    """
    launched, libraries = Launched(request), library_streams(request)
    trunk_times = [
        time
        for time, work in zip(launched.times, launched.work, strict=True)
        if work.kind == "kernel" and work.on == trunk
    ]
    records = sorted(call.start_us for call in request.calls if call.name in EVENT_RECORDS)
    captured = captures(request)
    found = []
    for join in request.waits:
        index = bisect.bisect_left(trunk_times, join.start_us)
        if join.stream != trunk[1] or index in (0, len(trunk_times)) or not launched.goes_on(join.start_us):
            continue
        latest, following = trunk_times[index - 1], trunk_times[index]
        if any(join.start_us <= begin < following for begin, _ in captured):
            continue
        begin, end = (bisect.bisect_left(launched.times, time) for time in (latest, join.start_us))
        side = [work for work in launched.work[begin:end] if work.kind == "kernel" and work.on != trunk]
        streams = {work.on for work in side}
        if len(streams) != 1 or streams <= libraries or any(work.graph for work in side):
            continue
        forks = [
            wait for wait in request.waits if wait.stream == side[0].stream and latest < wait.start_us < join.start_us
        ]
        recorded = bisect.bisect_right(records, forks[-1].start_us) - 1 if forks else -1
        alone = _alone_us(side, request)
        if recorded >= 0 and records[recorded] > latest and alone >= _ALONE_SHARE * length(intervals(side)):
            names = stream_name(trace, *trunk), stream_name(trace, *side[0].on)
            how = f"{names[0]} waits for {names[1]} before it is given more"
            found.append(Gate(tuple(side), how, alone))
    return found


def find_gate_waits(trace: Trace) -> Iterator[Finding]:
    """Find heads that the next segment waits for: asked for by the host, or joined as soon as they are forked."""
    trunk = trunk_stream(trace)
    gates = {
        id(request): [
            gate
            for gate in (*asked_gates(request), *(joined_gates(trace, request, trunk) if trunk is not None else ()))
            if gate.alone_us >= _ALONE_SHARE * length(intervals(gate.work))
        ]
        for request in trace.requests
    }
    cost = trace.median_us(lambda request: sum(gate.alone_us for gate in gates[id(request)]))
    seen = trace.noticed("gate-waits")
    if cost < _LEAST_US and not seen:
        return
    here = gates[id(trace.shown)]
    shown = here or next((found for found in gates.values() if found), [])
    evidence = [f"{gate.head}: {us(gate.alone_us)} with nothing beside it, and {gate.how}" for gate in shown] + [
        one.evidence for one in seen
    ]
    yield Finding(
        kind="gate-waits",
        what="A head is on the critical path: the next segment begins only when it has answered.",
        evidence=first_few(evidence),
        remedy="Let the segment after the head run beside it, and ask for the answer one segment later: a gate "
        "then costs nothing, and skips all but that segment. auxhead's runners ask where it pays.",
        snippet="from auxhead.model import EarlyExitNetwork, make_runner\n\n"
        "network = EarlyExitNetwork(backbone, heads, rules=0.9)\n"
        "with make_runner(network, images) as runner:\n"
        "    answer = runner(images)\n",
        cost_us=cost if cost >= _LEAST_US else None,
        lines=once_each(
            [*(work.call.line for gate in shown for work in gate.work if work.call is not None), *lines_of(seen)]
        ),
        marks=marks_of(work for gate in here for work in gate.work),
    )


def find_fusible_heads(trace: Trace) -> Iterator[Finding]:
    """Find heads that could be one launch each, as the doctor told from the module."""
    heads = trace.seen.heads
    fusible = [head.name for head in heads if head.why_not is None]
    if not fusible:
        return
    request = trace.shown

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
        work = work_of(request, name)
        told = f": {len(work)} launches, {us(sum(one.us for one in work))} on the device" if work else ""
        evidence.append(f"{name}{told}")
    evidence += [f"{head.name} stays as it is: {head.why_not}" for head in heads if head.why_not is not None]
    count = len(fusible)
    yield Finding(
        kind="fusible-heads",
        what=f"{count} head{'s' if count > 1 else ''} could be one launch each: {', '.join(first_few(fusible))}.",
        evidence=first_few(evidence, most=8),
        remedy="Swap them in place, with their parameters; or let an EarlyExitNetwork run them beside the trunk.",
        snippet="from auxhead.model import fuse_aux_heads\n\n"
        f"report = fuse_aux_heads(model, include={fusible[0] if count == 1 else fusible!r})\n"
        "print(report.replaced.keys(), report.left_alone)\n",
        cost_us=trace.median_us(saved_us) or None,
        marks=marks_of(work for name in fusible for work in work_of(request, name)),
    )
