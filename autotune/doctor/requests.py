"""Cuts a trace into requests: by annotations, by the profiler's steps, or by calls of the outermost module."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ..measuring.cuda_calls import ANNOTATION
from .events import Event, Events

#: How requests were told, in words.
BY_ANNOTATION = "the doctor's annotation"
BY_STEP = "ProfilerStep"
BY_MODULE = "calls of "
WHOLE = "nothing: the whole trace is taken for one request"

_MODULE = "nn.Module: "
_STEP = re.compile(r"ProfilerStep#\d+")


class Window(NamedTuple):
    """When the host was at one request, in the trace's own time."""

    start: float
    until: float
    """Calls count that begin before it."""
    returned: float
    """When the host returned."""
    exact: bool = True
    """False: it did not return before its last launch either."""


class Cut(NamedTuple):
    """One way to cut a trace."""

    by: str
    windows: list[Window]
    """In order of time, without overlap."""
    warm: bool = True


def cuts(events: Events) -> Iterator[Cut]:
    """Yield ways to cut a trace, the best first; the last one always has a window."""
    annotated = [event for event in events.annotations if event.name == ANNOTATION]
    if annotated:
        yield Cut(BY_ANNOTATION, _windows(annotated))
    steps = [event for event in events.annotations if _STEP.fullmatch(event.name)]
    if steps:
        # the first one after the profiler's own beginning
        yield Cut(BY_STEP, _windows(steps[1:] if len(steps) >= 3 else steps))
    modules = _outermost_modules(events.functions)
    if modules:
        yield _by_module(modules)
    begin = min((first[0].start for first in (events.calls, events.work) if first), default=0.0)
    yield Cut(WHOLE, [Window(begin, math.inf, begin, exact=False)], warm=False)


def _windows(annotations: list[Event]) -> list[Window]:
    windows: list[Window] = []
    for event in annotations:
        if not windows or event.start >= windows[-1].until:
            windows.append(Window(event.start, event.end, event.end))
    return windows


def _outermost_modules(functions: list[Event]) -> list[Event]:
    ends: dict[str, float] = {}
    outermost = []
    for event in functions:
        if event.name.startswith(_MODULE) and event.start >= ends.get(event.thread, -math.inf):
            outermost.append(event)
            ends[event.thread] = event.end
    return outermost


def _by_module(modules: list[Event]) -> Cut:
    """Let each call of one module begin a request: of the first that is called, or the first that is called again.

    The first third are warm-up. The last one would last until the trace ends, with whatever a script does at its end:
    it lasts as long as the longest before it.
    """
    times = Counter(event.name for event in modules)
    name = next((event.name for event in modules if times[event.name] > 1), modules[0].name)
    begins = [event.start for event in modules if event.name == name]
    longest = max((after - before for before, after in zip(begins, begins[1:], strict=False)), default=math.inf)
    untils = [*begins[1:], begins[-1] + longest]
    windows = []
    ends = iter(modules)
    event: Event | None = next(ends)
    for start, until in zip(begins, untils, strict=True):
        returned = start
        while event is not None and event.start < until:
            returned = max(returned, event.end) if event.start >= start else returned
            event = next(ends, None)
        windows.append(Window(start, until, returned, exact=False))
    return Cut(
        BY_MODULE + name.removeprefix(_MODULE).rpartition("_")[0],
        windows[len(windows) // 3 :],
        warm=len(windows) > 1,
    )
