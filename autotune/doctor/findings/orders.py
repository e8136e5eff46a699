"""Findings of wrong answers: races, memory freed in use, events never recorded, devices mixed up; as watched live."""

from collections.abc import Sequence

from ..finding import KINDS, Finding
from ..trace import Trace
from ..watched import Race
from .per_request import by_number, first_few, noticed, once_each, times

_WAIT = "other = torch.cuda.current_stream()\nother.wait_stream(side)  # before what side has written is read\n"
_RECORD_STREAM = "x.record_stream(side)  # its memory is reused only when side has done with it; or keep x until then\n"
_RECORDED = {
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


def find_races(trace: Trace) -> list[Finding]:
    """Find reads and writes of one tensor by streams that nothing orders, and tensors freed while they are used."""
    races = trace.seen.races
    found = []
    for kind, of_kind, remedy, snippet in (
        (
            "race",
            [race for race in races if not race.freed],
            "Let the stream that comes second wait for the one that comes first: else the answer is right by luck.",
            _WAIT,
        ),
        (
            "freed-in-use",
            [race for race in races if race.freed],
            "Tell the allocator that the other stream uses the tensor, or keep it until the streams are joined.",
            _RECORD_STREAM,
        ),
    ):
        if of_kind:
            found.append(_of_races(trace, kind, of_kind, remedy, snippet))
    return found


def _of_races(trace: Trace, kind: str, races: Sequence[Race], remedy: str, snippet: str) -> Finding:
    return Finding(
        kind=kind,
        what=f"{_sentence(kind)}: {races[0].tensor}" + (f", and {len(races) - 1} more" if races[1:] else "") + ".",
        evidence=first_few(
            [by_number(trace, f"{race.tensor}: {race.first}; then, with no order, {race.second}") for race in races]
        ),
        remedy=remedy,
        snippet=snippet,
        lines=once_each(line for race in races for line in race.lines),
    )


def find_noticed(trace: Trace) -> list[Finding]:
    """Find events waited for before they are recorded, devices mixed up, and the class in place of the context."""
    found = []
    for kind, (remedy, snippet) in _RECORDED.items():
        seen = noticed(trace, kind)
        if seen:
            found.append(
                Finding(
                    kind=kind,
                    what=f"{_sentence(kind)} ({times(len(seen))}).",
                    evidence=first_few([by_number(trace, one.evidence) for one in seen]),
                    remedy=remedy,
                    snippet=snippet,
                    lines=once_each(line for one in seen for line in one.lines),
                )
            )
    return found


def _sentence(kind: str) -> str:
    """Return what a kind is, as the begin of a sentence."""
    return KINDS[kind][0].upper() + KINDS[kind][1:]
