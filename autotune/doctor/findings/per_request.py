"""Amounts per request: the median over requests, the request shown; numbers and streams as findings write them."""

import re
from collections.abc import Callable, Iterable
from statistics import median_low

from ..trace import Request, Trace, Work
from ..watched import Noticed


def median_us(trace: Trace, amount: Callable[[Request], float]) -> float:
    """Return the lower median of an amount over the requests: 0 unless more than half of them have any of it."""
    return median_low(amount(request) for request in trace.requests)


def shown_request(trace: Trace) -> Request:
    """Return the request of median length, of which a timeline is drawn and findings have their marks."""
    middle = median_low(request.end_us for request in trace.requests)
    return next(request for request in trace.requests if request.end_us == middle)


def steady_from_us(trace: Trace, request: Request) -> float:
    """Return from when on what is done in a request is done in every one: of one that may be the first, its half."""
    launching = sorted(work.call.start_us for work in request.work if work.call is not None)
    return 0.0 if trace.warm or not launching else launching[len(launching) // 2]


def noticed(trace: Trace, kind: str) -> list[Noticed]:
    """Return what was noticed live of a kind."""
    return [one for one in trace.seen.noticed if one.kind == kind]


def once_each(lines: Iterable[str | None]) -> tuple[str, ...]:
    """Return lines in order, each once."""
    return tuple(dict.fromkeys(line for line in lines if line))


def first_few(lines: list[str], most: int = 5) -> tuple[str, ...]:
    """Return so many lines, and how many more there are."""
    return (*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else []))


def us(amount: float) -> str:
    """Write a time: ``1,234.5 us``."""
    return f"{amount:,.1f} us"


def times(count: int) -> str:
    """Write how often: ``once``, ``7 times``."""
    return "once" if count == 1 else f"{count} times"


def short_name(work: Work) -> str:
    """Return a kernel's name without its types and arguments."""
    name, depth, kept = work.name.removeprefix("void "), 0, []
    for letter in name:
        depth += letter in "<("
        if not depth:
            kept.append(letter)
        depth -= letter in ">)"
    return ("".join(kept) or name)[:60]


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
