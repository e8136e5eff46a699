"""``Finding``: what is wrong, how that is known, what it costs, what to do; and the words of its parts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ...records.intervals import Interval
from ..trace import Noticed, Trace, Work
from .kinds import KINDS


@dataclass(frozen=True)
class Mark:
    """A stretch of the shown request that a finding is about, for the timeline."""

    start_us: float
    """Since the request began."""
    end_us: float
    stream: int | None
    """Its number in the trace; None: the host."""


@dataclass(frozen=True)
class Finding:
    """One thing that keeps work from overlapping, or makes it wrong."""

    kind: str
    """One of :data:`~.kinds.KINDS`."""
    what: str
    """One sentence."""
    evidence: tuple[str, ...]
    """Kernels, times, streams; a line each."""
    remedy: str
    """One or two sentences."""
    snippet: str
    """Python that shows the remedy."""
    cost_us: float | None = None
    """Of a request; None: not told in time (a wrong answer, or unknown)."""
    lines: tuple[str, ...] = ()
    """Source lines that cause it, ``file.py:12``; none where the trace has no stacks."""
    marks: tuple[Mark, ...] = ()
    spread_us: tuple[float, float] | None = None
    """Between which values the cost lies, request by request; None where there is no cost."""


def found(
    kind: str,
    what: str,
    evidence: Iterable[str],
    cost_us: float | None = None,
    lines: Iterable[str | None] = (),
    marks: Iterable[Mark] = (),
    spread_us: tuple[float, float] | None = None,
) -> Finding:
    """Return a finding with what helps against its kind; of the evidence five lines, of the lines each once."""
    _, remedy, snippet = KINDS[kind]
    return Finding(kind, what, first_few(evidence), remedy, snippet, cost_us, once_each(lines), tuple(marks), spread_us)


def sentence(kind: str) -> str:
    """Return what a kind is, as the begin of a sentence."""
    what = KINDS[kind].what
    return what[0].upper() + what[1:]


def marks_of(work: Iterable[Work]) -> tuple[Mark, ...]:
    """Return marks of work on its streams."""
    return tuple(Mark(one.start_us, one.end_us, one.stream) for one in work)


def host_marks(spans: Iterable[Interval]) -> tuple[Mark, ...]:
    """Return marks of times on the host."""
    return tuple(Mark(begin, end, None) for begin, end in spans)


def lines_of(seen: Iterable[Noticed]) -> tuple[str, ...]:
    """Return the lines of what was noticed, each once."""
    return once_each(line for one in seen for line in one.lines)


def once_each(lines: Iterable[str | None]) -> tuple[str, ...]:
    """Return lines in order, each once."""
    return tuple(dict.fromkeys(line for line in lines if line))


def first_few(lines: Iterable[str], most: int = 5) -> tuple[str, ...]:
    """Return so many lines, and how many more there are."""
    lines = tuple(lines)
    return (*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else []))


def us(amount: float) -> str:
    """Write a time: ``1,234.5 us``."""
    return f"{amount:,.1f} us"


def times(count: int) -> str:
    """Write how often: ``once``, ``7 times``."""
    return "once" if count == 1 else f"{count} times"


def short_name(work: Work) -> str:
    """Return a kernel's name without its types and arguments."""
    name, changes = work.name.removeprefix("void "), 1
    while changes:
        name, changes = re.subn(r"[<(][^<>()]*[>)]", "", name)
    return (re.split("[<(]", name)[0] or work.name)[:60]


#: The number that CUPTI gives the default stream of a process's first device.
_DEFAULT = 7
_HANDLE = re.compile(r"\bstream (0x[0-9a-f]+)")


def stream_name(trace: Trace, device: int, number: int) -> str:
    """Return what a stream of a trace is called in evidence."""
    handles = {use.handle for use in trace.seen.streams if (use.device, use.number) == (device, number)}
    is_default = handles == {0} if handles else number == _DEFAULT
    return "the default stream" if is_default else f"stream {number}"


def by_number(trace: Trace, evidence: str) -> str:
    """Return evidence that watching wrote, in which streams are named by handles, with their numbers in the trace."""
    numbers = {f"{use.handle:#x}": use.number for use in trace.seen.streams if use.number is not None}
    return _HANDLE.sub(lambda found: f"stream {numbers.get(found[1], found[1])}", evidence)
