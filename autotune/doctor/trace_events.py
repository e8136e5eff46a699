"""A Chrome trace's file: unpacks and checks it, sorts its events by category, and tells requests apart in them."""

import bisect
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..measuring.cuda_calls import ANNOTATION
from ..records.record import MOST_BYTES, no_garbage_collection
from .trace import BadTrace

_GZIP = b"\x1f\x8b"
CALLS = ("cuda_runtime", "cuda_driver")
_FRAMES = ("user_annotation", "cpu_op", "python_function")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CATEGORIES = frozenset({*CALLS, *_FRAMES, *_WORK, "cuda_sync"})
#: Categories of other vendors' devices, and their calls under the names of CUDA's categories.
_OTHERS = re.compile(r"(hip|roc|xpu|hpu|mtia|npu|musa|privateuse1)\w*|(?!cuda_)\w+_(runtime|driver)")
_OTHER_CALLS = ("hip", "hsa", "roc")
#: No time in a record may be larger.
_MOST_US = 2.0**63

#: How requests were told, in words; of modules, a class follows.
BY_ANNOTATION, BY_STEP, BY_MODULE = "the doctor's annotation", "ProfilerStep", "calls of "
WHOLE = "nothing: the whole trace is taken for one request"
_MODULE = "nn.Module: "
_STEP = re.compile(r"ProfilerStep#\d+")


class TraceEvent(NamedTuple):
    """An event with a begin and an end, in microseconds of the trace's own time."""

    category: str
    name: str
    start: float
    end: float
    thread: str
    """Process and thread, of the host."""
    tid: int
    """Of the host's threads; 0 where it is no number."""
    args: Mapping[str, Any]

    def number(self, name: str) -> int | None:
        """Return an argument that is a whole number; None if it is not there or something else."""
        value = self.args.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


class TraceEvents(NamedTuple):
    """Events by what they are, each in order of time."""

    annotations: list[TraceEvent]
    operators: list[TraceEvent]
    functions: list[TraceEvent]
    """Of Python; none in a trace without stacks."""
    calls: list[TraceEvent]
    work: list[TraceEvent]
    synchronisations: list[TraceEvent]


def read_content(file: Path) -> dict[str, Any]:
    """Return the object that a trace's file holds, compressed by gzip or not.

    Raises:
        BadTrace: no such file, no JSON, no trace, or more than ``MOST_BYTES``.
    """
    try:
        packed = file.read_bytes()
    except OSError as error:
        raise BadTrace(f"{file}: cannot be read ({error.strerror})") from None
    text = _unpacked(packed, file)
    try:
        with no_garbage_collection():
            content = json.loads(text, strict=False)  # kineto escapes no control characters in names
    except RecursionError:
        raise BadTrace(f"{file}: is not JSON (nested too deep)") from None
    except ValueError as error:
        raise BadTrace(f"{file}: is not JSON ({error}), wants a trace of torch.profiler") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise BadTrace(f'{file}: has no list "traceEvents", wants a trace that torch.profiler exported')
    return content


def _unpacked(content: bytes, file: Path) -> str:
    if content.startswith(_GZIP):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise BadTrace(f"{file}: is compressed and cannot be read ({error}); copy or record it again") from None
    if len(content) > MOST_BYTES:
        raise BadTrace(f"{file}: holds more than {MOST_BYTES:,} bytes; record fewer requests")
    return content.decode("utf-8-sig", errors="replace")


def sorted_events(content: Mapping[str, Any]) -> TraceEvents:
    """Return the events that findings are made from; what is no event of these is passed over."""
    with no_garbage_collection():
        found: dict[str, list[TraceEvent]] = defaultdict(list)
        for item in content["traceEvents"]:
            if isinstance(item, dict) and item.get("ph") == "X" and str(item.get("cat")) in _CATEGORIES:
                event = _event(item)
                if event is not None:
                    found[event.category].append(event)
        for events in found.values():
            events.sort(key=_begin)
        calls = sorted((event for kind in CALLS for event in found[kind]), key=_begin)
        work = sorted((event for kind in _WORK for event in found[kind]), key=_begin)
        annotations, operators, functions = (found[kind] for kind in _FRAMES)
        return TraceEvents(annotations, operators, functions, calls, work, found["cuda_sync"])


def _event(item: Mapping[str, Any]) -> TraceEvent | None:
    try:
        start, length = float(item["ts"]), float(item.get("dur", 0.0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    name, args, tid = item.get("name"), item.get("args"), item.get("tid")
    if not isinstance(name, str) or not abs(start) < _MOST_US or not 0.0 <= length < _MOST_US:
        return None
    number, thread = tid if isinstance(tid, int) else 0, f"{item.get('pid')}/{tid}"
    return TraceEvent(item["cat"], name, start, start + length, thread, number, args if isinstance(args, dict) else {})


def _begin(event: TraceEvent) -> tuple[float, float]:
    """Sort those that begin at once by which ends last: it holds the others."""
    return event.start, -event.end


def other_vendor(content: Mapping[str, Any]) -> str | None:
    """Return the first category or call of a trace that tells of a device that is none of CUDA's."""
    for item in content["traceEvents"]:
        category, name = (str(item.get(key)) for key in ("cat", "name")) if isinstance(item, dict) else ("", "")
        if _OTHERS.fullmatch(category.lower()):
            return category
        if category in CALLS and name.startswith(_OTHER_CALLS):
            return name
    return None


class Window(NamedTuple):
    """When the host was at one request, in the trace's own time."""

    start: float
    until: float
    """Calls count that begin before it."""
    returned: float
    """When the host returned."""
    exact: bool = True
    """False: it did not return before its last launch either."""


class Partition(NamedTuple):
    """One way to tell the requests of a trace apart."""

    by: str
    windows: list[Window]
    """In order of time, without overlap."""
    warm: bool = True


def partitions(events: TraceEvents) -> Iterator[Partition]:
    """Yield ways to tell requests apart, the best first; the last one always has a window."""
    annotated = [event for event in events.annotations if event.name == ANNOTATION]
    if annotated:
        yield Partition(BY_ANNOTATION, _windows(annotated))
    steps = [event for event in events.annotations if _STEP.fullmatch(event.name)]
    if steps:
        # the first one after the profiler's own beginning
        yield Partition(BY_STEP, _windows(steps[1:] if len(steps) >= 3 else steps))
    modules = _outermost([event for event in events.functions if event.name.startswith(_MODULE)])
    if modules:
        yield _by_module(modules)
    begin = min((first[0].start for first in (events.calls, events.work) if first), default=0.0)
    yield Partition(WHOLE, [Window(begin, math.inf, begin, exact=False)], warm=False)


def _windows(annotations: list[TraceEvent]) -> list[Window]:
    windows: list[Window] = []
    for event in annotations:
        if not windows or event.start >= windows[-1].until:
            windows.append(Window(event.start, event.end, event.end))
    return windows


def _outermost(modules: list[TraceEvent]) -> list[TraceEvent]:
    """Return those calls of modules that lie in no other of their thread."""
    ends: dict[str, float] = {}
    outermost = []
    for event in modules:
        if event.start >= ends.get(event.thread, -math.inf):
            outermost.append(event)
            ends[event.thread] = event.end
    return outermost


def _by_module(modules: list[TraceEvent]) -> Partition:
    """Let each call of one module begin a request: of the first that is called, or the first that is called again.

    The first third are warm-up. The last one would last until the trace ends, with whatever a script does at its end:
    it lasts as long as the longest before it.
    """
    times = Counter(event.name for event in modules)
    name = next((event.name for event in modules if times[event.name] > 1), modules[0].name)
    begins = [event.start for event in modules if event.name == name]
    longest = max((after - before for before, after in zip(begins, begins[1:], strict=False)), default=math.inf)
    starts, windows = [event.start for event in modules], []
    for start, until in zip(begins, [*begins[1:], begins[-1] + longest], strict=True):
        within = modules[bisect.bisect_left(starts, start) : bisect.bisect_left(starts, until)]
        windows.append(Window(start, until, max((event.end for event in within), default=start), exact=False))
    by = BY_MODULE + name.removeprefix(_MODULE).rpartition("_")[0]
    return Partition(by, windows[len(windows) // 3 :], warm=len(windows) > 1)
