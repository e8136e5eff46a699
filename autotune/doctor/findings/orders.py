"""Findings that make answers wrong, or that only a watched run tells: from what was watched, as it is."""

from collections.abc import Sequence

from ..finding import Finding
from ..trace import Trace
from ..watched import Noticed, Race

#: Of one kind, those that are named.
_MOST = 5


def find_races(trace: Trace) -> list[Finding]:
    """Find accesses from two streams in no order, and tensors that are freed while another stream uses them."""
    races = () if trace.watched is None else trace.watched.races
    found = []
    apart = [one for one in races if not one.freed]
    if apart:
        found.append(
            Finding(
                "race",
                "Two streams access one tensor and nothing orders them: the answer depends on which is faster.",
                _in_words(apart),
                "Let the second stream wait for the first: wait_stream, or an event recorded behind the first access.",
                "side.wait_stream(torch.cuda.current_stream())  # before side reads\n"
                "with torch.cuda.stream(side):\n"
                "    answer = head(x)\n"
                "torch.cuda.current_stream().wait_stream(side)  # before answer is read here",
                lines=_lines(apart),
            )
        )
    freed = [one for one in races if one.freed]
    if freed:
        found.append(
            Finding(
                "freed-in-use",
                "A tensor is freed while another stream may still use it: PyTorch gives its memory to the next one.",
                _in_words(freed),
                "Hold a reference until the streams have been joined, or tell the allocator who uses it.",
                "x.record_stream(side)  # its memory is not reused before side is done with it",
                lines=_lines(freed),
            )
        )
    return found


def _in_words(races: Sequence[Race]) -> tuple[str, ...]:
    said = [f"{one.tensor}: {one.first}; {one.second}" for one in races[:_MOST]]
    return (*said, f"and {len(races) - _MOST} more") if len(races) > _MOST else tuple(said)


def _lines(races: Sequence[Race]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for one in races for line in one.lines))


_NOTICED = {
    "unrecorded-event": (
        "An event is waited for that was never recorded: the wait does nothing, and says nothing.",
        "Record the event behind the work that is to be waited for, on the stream of that work, before the wait.",
        "done = torch.cuda.Event()\ndone.record(trunk)\nside.wait_event(done)",
    ),
    "mixed-devices": (
        "Work on one GPU is launched within the context of a stream of another: it runs on its own GPU's current "
        "stream, and not on the one that is named.",
        "Use for each GPU a stream of its own, and let them wait for one another by events.",
        "side = torch.cuda.Stream(device=x.device)\nwith torch.cuda.stream(side):\n    y = layer(x)",
    ),
    "stream-class": (
        "torch.cuda.Stream(s) is the class: it makes another stream than s, for which nothing waits.",
        "Write the context, with a small s.",
        "with torch.cuda.stream(s):\n    answer = head(x)",
    ),
}


def find_noticed(trace: Trace) -> list[Finding]:
    """Find what was noticed while streams and events were used."""
    noticed: dict[str, list[Noticed]] = {}
    for one in () if trace.watched is None else trace.watched.noticed:
        if one.kind in _NOTICED:
            noticed.setdefault(one.kind, []).append(one)
    return [
        Finding(
            kind,
            what,
            tuple(dict.fromkeys(one.evidence for one in noticed[kind]))[:_MOST],
            remedy,
            snippet,
            lines=tuple(dict.fromkeys(line for one in noticed[kind] for line in one.lines)),
        )
        for kind, (what, remedy, snippet) in _NOTICED.items()
        if kind in noticed
    ]
