"""Findings of streams: no order between them, nothing that runs on them, no lower priority; and other misuse."""

from collections import defaultdict
from collections.abc import Iterator

from ...records.intervals import common, length
from ..trace import Stream, Trace, TracedRequest, Work
from .finding import Finding, by_number, found, lines_of, marks_of, sentence, stream_name, times, us
from .requests import intervals, library_streams, trunk_stream

#: A stream with more of the trunk's kernel time than this is no side stream: two that share the work are equals.
_SIDE_SHARE = 0.5
#: A side stream whose kernels take less of a request takes nothing that counts.
_LEAST_US = 5.0
#: What graphs run has the priorities of the streams that were captured: beyond this share the trunk's is not known.
_GRAPH_SHARE = 0.5


def find_races(trace: Trace) -> Iterator[Finding]:
    """Find reads and writes of one tensor by streams that nothing orders, and tensors freed while they are used."""
    for kind, is_freed in (("race", False), ("freed-in-use", True)):
        races = [race for race in trace.seen.races if race.freed is is_freed]
        told = [by_number(trace, f"{race.tensor}: {race.first}; then, with no order, {race.second}") for race in races]
        if races:
            more = f", and {len(races) - 1} more" if races[1:] else ""
            lines = (line for race in races for line in race.lines)
            yield found(kind, f"{sentence(kind)}: {races[0].tensor}{more}.", told, lines=lines)


def find_noticed(trace: Trace) -> Iterator[Finding]:
    """Find events waited for before they are recorded, devices mixed up, and the class in place of the context."""
    for kind in ("unrecorded-event", "mixed-devices", "stream-class"):
        if seen := trace.noticed(kind):
            told = [by_number(trace, one.evidence) for one in seen]
            yield found(kind, f"{sentence(kind)} ({times(len(seen))}).", told, lines=lines_of(seen))


def find_default_stream(trace: Trace) -> Iterator[Finding]:
    """Find that all ran on one stream, launches that watching missed as well, although others were made."""
    streams: set[Stream] = set()
    for request in trace.requests:
        streams |= {work.on for work in request.work} - library_streams(request)
    if len(streams) != 1:
        return
    seen = trace.noticed("default-stream")
    evidence = [one.evidence for one in seen]
    count = sum(len(request.kernels) for request in trace.requests)
    unused = [use for use in trace.seen.streams if use.operators == 0 and use.handle != 0]
    if unused and not any(work.graph for request in trace.requests for work in request.work):
        made = "1 stream was" if len(unused) == 1 else f"{len(unused)} streams were"
        evidence.append(
            f"{made} made and ran nothing; all {count} kernels of {len(trace.requests)} requests ran on "
            f"{stream_name(trace, *streams.pop())}"
        )
    if evidence:
        what = "Everything runs on one stream, one after the other, although others were made."
        yield found("default-stream", what, evidence, lines=lines_of(seen))


def _priorities(trace: Trace) -> dict[Stream, int]:
    """Return the priorities of streams whose number in the trace is known and means one priority."""
    found: dict[Stream, set[int]] = defaultdict(set)
    for use in trace.seen.streams:
        if use.number is not None:
            found[use.device, use.number].add(use.priority)
    return {stream: priorities.pop() for stream, priorities in found.items() if len(priorities) == 1}


def find_priorities(trace: Trace) -> Iterator[Finding]:
    """Find side streams that are not lower in priority than the trunk's.

    Streams of graphs do not count: their kernels have the priorities of the streams that were captured. Nor does what
    runs before the trunk's first kernel or after its last one, as on the stream of the caller.
    """
    trunk, priorities = trunk_stream(trace), _priorities(trace)
    if trunk is None or trunk not in priorities:
        return
    on_trunk = [work for request in trace.requests for work in request.kernels if work.on == trunk]
    if sum(work.us for work in on_trunk if work.graph) > _GRAPH_SHARE * sum(work.us for work in on_trunk):
        return

    def within(request: TracedRequest, stream: Stream) -> list[Work]:
        spans = [(work.start_us, work.end_us) for work in request.kernels if work.on == trunk]
        first, last = min((begin for begin, _ in spans), default=0.0), max((end for _, end in spans), default=0.0)
        return [
            work
            for work in request.kernels
            if work.on == stream and not work.graph and work.end_us > first and work.start_us < last
        ]

    def kernel_us(stream: Stream) -> float:
        return trace.median_us(lambda request: sum(work.us for work in within(request, stream)))

    taken_us = {stream: kernel_us(stream) for stream in sorted(priorities) if stream[0] == trunk[0]}
    first = priorities[trunk]
    sides = [
        stream
        for stream, taken in taken_us.items()
        if stream != trunk and priorities[stream] <= first and _LEAST_US <= taken <= _SIDE_SHARE * taken_us[trunk]
    ]
    if not sides:
        return
    beside = [work for side in sides for work in within(trace.shown, side)]
    both = length(common(intervals(beside), intervals(work for work in trace.shown.kernels if work.on == trunk)))
    told = [
        f"{role}: {stream_name(trace, *stream)}, priority {priorities[stream]}, {us(taken_us[stream])} of kernels a "
        "request"
        for role, stream in (("trunk", trunk), *(("side", side) for side in sides))
    ]
    is_equal = all(priorities[side] == first for side in sides)
    yield found(
        "priority",
        "The side stream has the priority of the trunk's, and takes multiprocessors from what is waited for."
        if is_equal
        else "The side stream is higher in priority than the trunk's, and takes multiprocessors from it.",
        (*told, f"both run for {us(both)} of the request at once (lower numbers go first)"),
        marks=marks_of(beside),
    )
