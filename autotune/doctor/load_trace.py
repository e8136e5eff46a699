"""Reads a Chrome trace of torch.profiler into the requests that findings are made from."""

import bisect
import gzip
import io
import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ...model.basics.garbage import no_garbage_collection
from ..measuring.cuda_calls import ANNOTATION, GRAPH_LAUNCHES, HEAD, plain_name
from ..records.record import MOST_BYTES
from .trace import KEY, ApiCall, BadTrace, Trace, TracedRequest, Wait, Watched, Work
from .user_code import profiled_line

_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
_CATEGORIES = {*_CALLS, *_WORK, "user_annotation", "cpu_op", "python_function", "cuda_sync"}
#: Categories of other vendors' devices, and their calls under the names of CUDA's categories.
_OTHERS = re.compile(r"(hip|roc|xpu|hpu|mtia|npu|musa|privateuse1)\w*|(?!cuda_)\w+_(runtime|driver)")
_OTHER_CALLS = ("hip", "hsa", "roc")
#: No time in a record may be larger.
_MOST_US = 2.0**63
_MODULE = "nn.Module: "


class TraceEvent(NamedTuple):
    """An event with a begin and an end, in microseconds of the trace's own time."""

    category: str
    name: str
    start: float
    end: float
    thread: tuple[Any, Any]
    """Process and thread, of the host."""
    args: Mapping[str, Any]

    def number(self, name: str) -> int | None:
        """Return an argument that is a whole number; None if it is not there or something else."""
        value = self.args.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


class CallSite(NamedTuple):
    """What a call is made in, innermost first."""

    operator: TraceEvent | None = None
    line: str | None = None
    head: str | None = None


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
    """In words."""
    windows: list[Window]
    """In order of time, without overlap."""
    warm: bool = True
    follow: bool = True
    """One request begins where the one before ends."""


def load_trace(file: Path) -> Trace:
    """Read a trace, ``.json`` or ``.json.gz``.

    Requests are told by the doctor's annotation, else by the profiler's steps (without the first of three or more),
    else by calls of the outermost module (without the first third), else the whole trace is one. What the device ran
    belongs to the request in which the host launched it.

    Raises:
        BadTrace: no file, no JSON, no trace, nothing on a device in it or on one of another vendor, or a broken key of
            the doctor's own.
    """
    content = read_content(file)
    if (told := _other_vendor(content)) is not None:
        raise BadTrace(
            f"{file}: is of another vendor's device ({told!r:.60}); wants a trace of an NVIDIA GPU: the doctor knows "
            "CUDA's calls alone"
        )
    with no_garbage_collection():
        events = _events(content["traceEvents"])
    work = _sorted(each for kind in _WORK for each in events[kind])
    if not work:
        raise BadTrace(
            f"{file}: holds no work of a GPU; record with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA])"
        )
    if all(one.number("stream") is None for one in work):
        raise BadTrace(f"{file}: tells no stream of what its GPU ran, wants a trace as torch.profiler writes it")
    watched = None
    if KEY in content:
        try:
            watched = Watched.from_json(content[KEY])
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise BadTrace(f'{file}: its key "{KEY}" is not what the doctor writes ({error!r:.80})') from None
    calls = list(_located_calls(events))
    for partition in _partitions(events, work):
        requests = [one for one in _requests(partition, calls, work, events["cuda_sync"]) if one.work]
        if requests:
            break
    else:
        raise BadTrace(f"{file}: what its GPU ran was launched by nothing in it; record from before the launches")
    if partition.follow if watched is None else watched.back_to_back:
        begins = [one.start_us + min(work.start_us for work in one.work) for one in requests]
        for index, begin in enumerate(begins[1:]):
            requests[index] = replace(requests[index], next_us=begin - requests[index].start_us)
    properties = content.get("deviceProperties")
    devices = tuple(one for one in properties if isinstance(one, dict)) if isinstance(properties, list) else ()
    return Trace(tuple(requests), partition.by, devices, bool(events["python_function"]), watched, partition.warm)


# The file.


def read_content(file: Path) -> dict[str, Any]:
    """Return the object that a trace's file holds, compressed by gzip or not.

    Raises:
        BadTrace: no such file, no JSON, no trace, or more than ``MOST_BYTES``.
    """
    try:
        content = file.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(MOST_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadTrace(f"{file}: is compressed and cannot be read ({error}); copy or record it again") from None
    except OSError as error:
        raise BadTrace(f"{file}: cannot be read ({error.strerror})") from None
    if len(content) > MOST_BYTES:
        raise BadTrace(f"{file}: holds more than {MOST_BYTES:,} bytes; record fewer requests")
    try:
        with no_garbage_collection():
            # kineto escapes no control characters in names
            found = json.loads(content.decode("utf-8-sig", errors="replace"), strict=False)
    except RecursionError:
        raise BadTrace(f"{file}: is not JSON (nested too deep)") from None
    except ValueError as error:
        raise BadTrace(f"{file}: is not JSON ({error}), wants a trace of torch.profiler") from None
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise BadTrace(f'{file}: has no list "traceEvents", wants a trace that torch.profiler exported')
    return found


def _other_vendor(content: Mapping[str, Any]) -> str | None:
    """Return the first category or call of a trace that tells of a device that is none of CUDA's."""
    for item in content["traceEvents"]:
        category, name = (str(item.get(key)) for key in ("cat", "name")) if isinstance(item, dict) else ("", "")
        if _OTHERS.fullmatch(category.lower()):
            return category
        if category in _CALLS and name.startswith(_OTHER_CALLS):
            return name
    return None


def _events(items: Iterable[Any]) -> dict[str, list[TraceEvent]]:
    """Return events by category, each in order of time; what is no event is passed over."""
    found: dict[str, list[TraceEvent]] = defaultdict(list)
    for item in items:
        if not isinstance(item, dict) or item.get("ph") != "X" or str(item.get("cat")) not in _CATEGORIES:
            continue
        name, args = item.get("name"), item.get("args")
        try:
            start, length = float(item["ts"]), float(item.get("dur", 0.0))
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        if isinstance(name, str) and abs(start) < _MOST_US and 0.0 <= length < _MOST_US:
            thread = str(item.get("pid")), item.get("tid")
            args = args if isinstance(args, dict) else {}
            found[item["cat"]].append(TraceEvent(item["cat"], name, start, start + length, thread, args))
    return defaultdict(list, {category: _sorted(events) for category, events in found.items()})


def _sorted(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Sort by time, and those that begin at once by which ends last: it holds the others."""
    return sorted(events, key=lambda event: (event.start, -event.end))


# Requests.


def _partitions(events: Mapping[str, list[TraceEvent]], work: list[TraceEvent]) -> Iterator[Partition]:
    """Yield ways to tell requests apart, the best first; the last one always has a window."""
    if annotated := [event for event in events["user_annotation"] if event.name == ANNOTATION]:
        yield Partition("the doctor's annotation", _windows(annotated), follow=False)
    if steps := [event for event in events["user_annotation"] if re.fullmatch(r"ProfilerStep#\d+", event.name)]:
        # the first one after the profiler's own beginning
        yield Partition("ProfilerStep", _windows(steps[1:] if len(steps) >= 3 else steps))
    modules, ends = [], dict[Any, float]()
    for event in events["python_function"]:  # those that lie in no other of their thread
        if event.name.startswith(_MODULE) and event.start >= ends.get(event.thread, -math.inf):
            modules.append(event)
            ends[event.thread] = event.end
    if modules:
        yield _by_module(modules)
    begin = min([work[0].start, *(one.start for kind in _CALLS for one in events[kind][:1])])
    by = "nothing: the whole trace is taken for one request"
    yield Partition(by, [Window(begin, math.inf, begin, exact=False)], warm=False)


def _windows(annotations: list[TraceEvent]) -> list[Window]:
    windows: list[Window] = []
    for event in annotations:
        if not windows or event.start >= windows[-1].until:
            windows.append(Window(event.start, event.end, event.end))
    return windows


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
    by = "calls of " + name.removeprefix(_MODULE).rpartition("_")[0]
    return Partition(by, windows[len(windows) // 3 :], warm=len(windows) > 1)


def _located_calls(events: Mapping[str, list[TraceEvent]]) -> Iterator[tuple[TraceEvent, CallSite]]:
    """Yield each call with its site, thread by thread.

    Whatever holds a call has begun before it on the same thread, and not ended: one pass with a stack.
    """
    by_thread: dict[Any, list[TraceEvent]] = defaultdict(list)
    for category in ("user_annotation", "python_function", "cpu_op", *_CALLS):
        for event in events[category]:
            if category != "user_annotation" or event.name.startswith(HEAD):
                by_thread[event.thread].append(event)
    for on_thread in by_thread.values():
        stack: list[tuple[float, CallSite]] = [(math.inf, CallSite())]
        for event in _sorted(on_thread):
            while stack[-1][0] <= event.start:
                stack.pop()
            site = stack[-1][1]
            if event.category in _CALLS:
                yield event, site
            elif event.category == "cpu_op":
                stack.append((event.end, site._replace(operator=event)))
            elif event.category == "user_annotation":
                stack.append((event.end, site._replace(head=event.name.removeprefix(HEAD))))
            else:
                stack.append((event.end, site._replace(line=profiled_line(event.name) or site.line)))


def _requests(
    partition: Partition,
    calls: list[tuple[TraceEvent, CallSite]],
    work: list[TraceEvent],
    synchronisations: list[TraceEvent],
) -> Iterator[TracedRequest]:
    windows = partition.windows
    starts = [window.start for window in windows]

    def index_at(time: float) -> int | None:
        index = bisect.bisect_right(starts, time) - 1
        return index if index >= 0 and time < windows[index].until else None

    calls_of: list[list[ApiCall]] = [[] for _ in windows]
    work_of: list[list[Work]] = [[] for _ in windows]
    waits_of: list[list[Wait]] = [[] for _ in windows]
    launched: dict[int, tuple[int | None, ApiCall | None]] = {}
    for event, site in calls:
        index, correlation, call = index_at(event.start), event.number("correlation"), None
        if index is not None:
            call = _call(event, site, starts[index])
            calls_of[index].append(call)
        if correlation is not None:
            launched[correlation] = (index, call)
    for event in work:
        nobody, correlation = (index_at(event.start), None), event.number("correlation")
        index, call = nobody if correlation is None else launched.get(correlation, nobody)
        if index is not None:
            work_of[index].append(_work(event, call, starts[index]))
    for event in synchronisations:
        index, stream = index_at(event.start), event.number("stream")
        if event.name == "Stream Wait Event" and index is not None and stream is not None:
            waits_of[index].append(Wait(event.start - starts[index], stream))
    for window, its_calls, its_work, waits in zip(windows, calls_of, work_of, waits_of, strict=True):
        ends = [window.returned - window.start, *(one.end_us for one in its_work)]
        if not window.exact:
            ends += [one.call.end_us for one in its_work if one.call is not None]
        its_calls.sort(key=lambda call: call.start_us)
        yield TracedRequest(window.start, max(ends), tuple(its_calls), tuple(its_work), tuple(waits))


def _call(event: TraceEvent, site: CallSite, start: float) -> ApiCall:
    operator, thread = site.operator, event.thread[1]
    return ApiCall(
        name=plain_name(event.name),
        start_us=event.start - start,
        end_us=event.end - start,
        thread=thread if isinstance(thread, int) else 0,
        operator=None if operator is None else operator.name,
        line=site.line,
        operator_us=None if operator is None else (operator.start - start, operator.end - start),
        head=site.head,
    )


def _work(event: TraceEvent, call: ApiCall | None, start: float) -> Work:
    return Work(
        kind=_WORK[event.category],
        name=event.name,
        start_us=event.start - start,
        end_us=event.end - start,
        device=event.number("device") or 0,
        stream=event.number("stream") or 0,
        call=call,
        graph=call is not None and call.name in GRAPH_LAUNCHES,
        grid=_three(event.args.get("grid")),
        block=_three(event.args.get("block")),
    )


def _three(sizes: Any) -> tuple[int, int, int] | None:
    if isinstance(sizes, list) and len(sizes) == 3 and all(isinstance(size, int) for size in sizes):
        return tuple(sizes)
    return None
