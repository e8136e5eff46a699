"""What findings share: stretches of requests with the same cause are put together, and what is rare is passed over."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ...records.intervals import Interval, merged
from ..finding import Mark
from ..trace import Call, Request, Trace, Work


class Stretch(NamedTuple):
    """A part of a request that a finding is about."""

    cause: str
    """Those of one cause become one finding."""
    cost_us: float
    mark: Mark
    evidence: str
    line: str | None


class Cause(NamedTuple):
    """All stretches of one cause."""

    cost_us: float
    """Of a request; the median over all of them."""
    times: float
    """How often in a request; the median."""
    marks: tuple[Mark, ...]
    """Of the shown request."""
    evidence: tuple[str, ...]
    lines: tuple[str, ...]


def causes(trace: Trace, stretches_of: Callable[[Request], Iterable[Stretch]]) -> dict[str, Cause]:
    """Return what more than half of the requests have, by cause, most costly first."""
    by_request = [(request, list(stretches_of(request))) for request in trace.requests]
    names = dict.fromkeys(one.cause for _, stretches in by_request for one in stretches)
    found = {}
    for name in names:
        own = [(request, [one for one in stretches if one.cause == name]) for request, stretches in by_request]
        if 2 * sum(bool(stretches) for _, stretches in own) <= len(own):
            continue
        of_all = [one for _, stretches in own for one in stretches]
        found[name] = Cause(
            statistics.median(sum(one.cost_us for one in stretches) for _, stretches in own),
            statistics.median(len(stretches) for _, stretches in own),
            tuple(one.mark for request, stretches in own if request is trace.shown for one in stretches),
            tuple(dict.fromkeys(one.evidence for one in of_all)),
            tuple(dict.fromkeys(one.line for one in of_all if one.line is not None)),
        )
    return dict(sorted(found.items(), key=lambda one: -one[1].cost_us))


def on_host(call: Call, end_us: float | None = None) -> Mark:
    """Return the mark of a call, or of what begins with one."""
    return Mark(call.start_us, call.end_us if end_us is None else end_us, None)


def busy(work: Iterable[Work]) -> list[Interval]:
    """Return when any of the work runs."""
    return merged((one.start_us, one.end_us) for one in work)


def kernels(request: Request) -> list[Work]:
    """Return the kernels of a request."""
    return [one for one in request.work if one.kind == "kernel"]


def by_stream(work: Sequence[Work]) -> dict[tuple[int, int], list[Work]]:
    """Return work by device and stream, the one that runs longest, the trunk's, first."""
    found: dict[tuple[int, int], list[Work]] = defaultdict(list)
    for one in work:
        found[one.device, one.stream].append(one)
    return dict(sorted(found.items(), key=lambda pair: -sum(one.us for one in pair[1])))


def times(number: float, what: str) -> str:
    """Return "3 kernels", with a plural by an s."""
    said = f"{number:,.1f}".removesuffix(".0")
    return f"{said} {what}{'' if said == '1' else 's'}"
