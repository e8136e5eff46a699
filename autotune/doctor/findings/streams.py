"""Findings of streams: no order between them, nothing that runs on them, no lower priority; and other misuse."""

from collections import defaultdict
from collections.abc import Iterator

from ...records.intervals import common, length
from ..trace import Stream, Trace, TracedRequest, Work
from .finding import KINDS, Finding, by_number, first_few, lines_of, marks_of, once_each, stream_name, times, us
from .requests import intervals, library_streams, trunk_stream

#: A stream with more of the trunk's kernel time than this is no side stream: two that share the work are equals.
_SIDE_SHARE = 0.5
#: A side stream whose kernels take less of a request takes nothing that counts.
_LEAST_US = 5.0
#: What graphs run has the priorities of the streams that were captured: beyond this share the trunk's is not known.
_GRAPH_SHARE = 0.5

#: Remedy and snippet of what only watching tells, by kind.
_SEEN = {
    "race": (
        "Let the stream that comes second wait for the one that comes first: else the answer is right by luck.",
        "other = torch.cuda.current_stream()\nother.wait_stream(side)  # before what side has written is read\n",
    ),
    "freed-in-use": (
        "Tell the allocator that the other stream uses the tensor, or keep it until the streams are joined.",
        "x.record_stream(side)  # its memory is reused only when side has done with it; or keep x until then\n",
    ),
    "unrecorded-event": (
        "An event that was never recorded is no wait: record it behind the work, and wait for it after that.",
        "event = torch.cuda.Event()\n"
        "event.record(producer)  # behind what is waited for\n"
        "consumer.wait_event(event)  # only then\n",
    ),
    "mixed-devices": (
        "Make each device's streams and events on it, and be on it while work is launched there.",
        "with torch.cuda.device(x.device):\n"
        "    stream = torch.cuda.Stream(x.device)\n"
        "    with torch.cuda.stream(stream):\n"
        "        y = f(x)\n",
    ),
    "stream-class": (
        "`torch.cuda.Stream(s)` makes a stream; `torch.cuda.stream(s)` is the context that runs a block on s.",
        "with torch.cuda.stream(s):  # a small s\n    y = head(x)\n",
    ),
}


def find_races(trace: Trace) -> Iterator[Finding]:
    """Find reads and writes of one tensor by streams that nothing orders, and tensors freed while they are used."""
    for kind, is_freed in (("race", False), ("freed-in-use", True)):
        races = [race for race in trace.seen.races if race.freed is is_freed]
        told = [by_number(trace, f"{race.tensor}: {race.first}; then, with no order, {race.second}") for race in races]
        if races:
            what = f"{_sentence(kind)}: {races[0].tensor}" + (f", and {len(races) - 1} more" if races[1:] else "") + "."
            lines = once_each(line for race in races for line in race.lines)
            yield Finding(kind, what, first_few(told), *_SEEN[kind], lines=lines)


def find_noticed(trace: Trace) -> Iterator[Finding]:
    """Find events waited for before they are recorded, devices mixed up, and the class in place of the context."""
    for kind in ("unrecorded-event", "mixed-devices", "stream-class"):
        seen = trace.noticed(kind)
        if seen:
            told = first_few([by_number(trace, one.evidence) for one in seen])
            what = f"{_sentence(kind)} ({times(len(seen))})."
            yield Finding(kind, what, told, *_SEEN[kind], lines=lines_of(seen))


def _sentence(kind: str) -> str:
    """Return what a kind is, as the begin of a sentence."""
    return KINDS[kind][0].upper() + KINDS[kind][1:]


def find_default_stream(trace: Trace) -> Iterator[Finding]:
    """Find backwards beside their block, or that all ran on one stream, launches that watching missed as well."""
    yield from _strayed_backwards(trace)
    yield from _all_on_one_stream(trace)


def _strayed_backwards(trace: Trace) -> Iterator[Finding]:
    seen = [one for one in trace.noticed("default-stream") if one.of_backward]
    if not seen:
        return
    yield Finding(
        kind="default-stream",
        what="A backward runs on the streams of its forward, and not on that of the block it is called in.",
        evidence=first_few([one.evidence for one in seen]),
        remedy="Run the forward in the block too: autograd runs each operator of a backward on the stream of its "
        "forward, and the stream that calls it waits for them.",
        snippet="side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side):\n"
        "    loss = criterion(model(x), y)\n"
        "    loss.backward()\n"
        "torch.cuda.current_stream().wait_stream(side)  # before the gradients are read\n",
        lines=lines_of(seen),
    )


def _all_on_one_stream(trace: Trace) -> Iterator[Finding]:
    streams: set[Stream] = set()
    for request in trace.requests:
        streams |= {work.on for work in request.work} - library_streams(request)
    if len(streams) != 1:
        return
    seen = [one for one in trace.noticed("default-stream") if not one.of_backward]
    evidence = [one.evidence for one in seen]
    count = sum(len(request.kernels) for request in trace.requests)
    unused = [use for use in trace.seen.streams if use.operators == 0 and use.handle != 0]
    graphs = any(work.graph for request in trace.requests for work in request.work)
    if unused and not graphs:
        made = "1 stream was" if len(unused) == 1 else f"{len(unused)} streams were"
        evidence.append(
            f"{made} made and ran nothing; all {count} kernels of {len(trace.requests)} requests ran on "
            f"{stream_name(trace, *next(iter(streams)))}"
        )
    if not evidence:
        return
    yield Finding(
        kind="default-stream",
        what="Everything runs on one stream, one after the other, although others were made.",
        evidence=first_few(evidence),
        remedy="Launch what is to run beside the rest inside of the context of its stream, between a wait of that "
        "stream for its input and a wait for its result.",
        snippet="side = torch.cuda.Stream(priority=0)  # once; the trunk's has priority=-1\n"
        "side.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(side):\n"
        "    answer = head(x)\n"
        "y = next_block(x)  # beside it\n"
        "torch.cuda.current_stream().wait_stream(side)\n",
        lines=lines_of(seen),
    )


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
    yield Finding(
        kind="priority",
        what="The side stream has the priority of the trunk's, and takes multiprocessors from what is waited for."
        if all(priorities[side] == first for side in sides)
        else "The side stream is higher in priority than the trunk's, and takes multiprocessors from it.",
        evidence=(*told, f"both run for {us(both)} of the request at once (lower numbers go first)"),
        remedy="Run the trunk on a stream of higher priority: the default stream has the lowest there is, so that "
        "none can be lower.",
        snippet="trunk = torch.cuda.Stream(priority=-1)  # sooner\n"
        "side = torch.cuda.Stream(priority=0)  # later\n"
        "trunk.wait_stream(torch.cuda.current_stream())\n"
        "with torch.cuda.stream(trunk):\n"
        "    y = model(x)  # forks its heads to side\n"
        "torch.cuda.current_stream().wait_stream(trunk)\n",
        marks=marks_of(beside),
    )
