"""Reads a Chrome trace of torch.profiler into requests: events are sorted once, and each is looked up on its thread."""

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..measuring.cuda_calls import ANNOTATION, GRAPH_LAUNCHES
from ..records.record import MOST_BYTES
from .annotations import HEAD
from .frames import user_line
from .trace import BadTrace, Call, Request, Trace, Wait, Work
from .watched import KEY, Watched

_HOW = "; record it with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) on a GPU"
_WORK = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
_API = ("cuda_runtime", "cuda_driver")
_MODULE = "nn.Module: "
#: Of requests told by calls of a module, those that are taken for warm-up: one in so many.
_WARM_UP = 3

_Event = Mapping[str, Any]


class _Span(NamedTuple):
    """A stretch of time on the host."""

    start: float
    end: float


def read_trace(file: Path) -> Trace:
    """Read a trace, ``.json`` or ``.json.gz``.

    Raises:
        BadTrace: see there.
    """
    content = _content(file)
    events = [one for one in content["traceEvents"] if isinstance(one, dict) and one.get("ph") == "X" and "dur" in one]
    try:
        events.sort(key=lambda one: (float(one["ts"]), -float(one["dur"])))
        by_category: dict[str, list[_Event]] = defaultdict(list)
        for one in events:
            by_category[str(one.get("cat"))].append(one)
        if not any(by_category[category] for category in _WORK):
            raise BadTrace(f"{file}: has no work of a GPU{_HOW}")
        spans, cut_by = _cut(by_category)
        has_stacks = bool(by_category["python_function"])
        calls = _calls(by_category, has_stacks)
        requests = _requests(spans, calls, by_category)
        watched = Watched.from_json(content[KEY]) if KEY in content else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, BadTrace):
            raise
        raise BadTrace(f"{file}: is no trace that can be read: {type(error).__name__}: {error}{_HOW}") from None
    if not any(one.work for one in requests):
        raise BadTrace(f"{file}: no work of a GPU was launched in a request ({cut_by}){_HOW}")
    devices = content.get("deviceProperties")
    return Trace(requests, cut_by, tuple(devices) if isinstance(devices, list) else (), has_stacks, watched)


def _content(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        with (gzip.open if zipped else open)(file, "rb") as opened:
            text = opened.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise BadTrace(f"{file}: holds more than {MOST_BYTES:,} bytes; profile fewer requests")
        content = json.loads(text)
    except (EOFError, UnicodeDecodeError, json.JSONDecodeError, gzip.BadGzipFile, RecursionError) as error:
        raise BadTrace(f"{file}: is no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise BadTrace(f"{file}: has no list of traceEvents{_HOW}")
    return content


def _span(event: _Event) -> _Span:
    return _Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]))


def _cut(by_category: Mapping[str, Sequence[_Event]]) -> tuple[list[_Span], str]:
    """Return requests in the trace's time, and how they were told."""
    annotated = by_category["user_annotation"]
    spans = [_span(one) for one in annotated if one["name"] == ANNOTATION]
    if spans:
        return spans, "the doctor's annotation"
    spans = [_span(one) for one in annotated if one["name"].startswith("ProfilerStep#")]
    if spans:
        return spans[1:] if len(spans) > 2 else spans, "ProfilerStep"
    modules = _outermost(one for one in by_category["python_function"] if one["name"].startswith(_MODULE))
    names = [one["name"] for one in modules]
    again = next((name for index, name in enumerate(names) if name in names[:index]), None)
    ends = [_span(one).end for category in _WORK for one in by_category[category]]
    ends += [_span(one).end for category in _API for one in by_category[category]]
    if again is not None:
        begins = [float(one["ts"]) for one in modules if one["name"] == again]
        spans = [_Span(*pair) for pair in zip(begins, [*begins[1:], max(ends)], strict=True)]
        return spans[len(spans) // _WARM_UP :], f"calls of {again.removeprefix(_MODULE).rpartition('_')[0]}"
    begins = [float(one["ts"]) for category in (*_API, *_WORK) for one in by_category[category]]
    return [_Span(min(begins), max(ends))], "nothing: the whole trace is taken for one"


def _outermost(events: Iterable[_Event]) -> list[_Event]:
    found: list[_Event] = []
    ends: dict[Any, float] = {}
    for one in events:
        if float(one["ts"]) >= ends.get(one.get("tid"), float("-inf")):
            found.append(one)
            ends[one.get("tid")] = _span(one).end
    return found


class _Numbered(NamedTuple):
    """A call, and where in the trace's time it began."""

    ts: float
    event: _Event
    operator: str | None
    line: str | None
    head: str | None


def _calls(by_category: Mapping[str, Sequence[_Event]], has_stacks: bool) -> list[_Numbered]:
    """Return the calls of the CUDA API with what encloses each, in order of time: one sweep a thread, with a stack."""
    enclosing: dict[Any, list[tuple[str, _Event]]] = defaultdict(list)
    for category in ("user_annotation", "cpu_op", "python_function", *_API):
        for one in by_category[category]:
            enclosing[one.get("tid")].append((category, one))
    found = []
    for of_thread in enclosing.values():
        of_thread.sort(key=lambda pair: (float(pair[1]["ts"]), -float(pair[1]["dur"])))
        stack: list[tuple[float, str, str]] = []
        for category, one in of_thread:
            begin, end = _span(one)
            while stack and stack[-1][0] <= begin:
                stack.pop()
            if category in _API:
                found.append(_Numbered(begin, one, *_around(stack, has_stacks)))
            else:
                stack.append((end, category, one["name"]))
    return sorted(found, key=lambda one: one.ts)


def _around(stack: Sequence[tuple[float, str, str]], has_stacks: bool) -> tuple[str | None, str | None, str | None]:
    """Return the innermost operator, line of the user's and head of what encloses a call."""
    operator = line = head = None
    for _, category, name in reversed(stack):
        if category == "cpu_op" and operator is None:
            operator = name
        elif category == "user_annotation" and head is None and name.startswith(HEAD):
            head = name.removeprefix(HEAD)
        elif category == "python_function" and line is None and has_stacks:
            line = user_line(name)
    return operator, line, head


def _requests(
    spans: Sequence[_Span], calls: Sequence[_Numbered], by_category: Mapping[str, Sequence[_Event]]
) -> tuple[Request, ...]:
    begins = [span.start for span in spans]

    def request_at(ts: float) -> int | None:
        index = bisect_right(begins, ts) - 1
        return index if index >= 0 and ts <= spans[index].end else None

    own_calls: list[list[Call]] = [[] for _ in spans]
    by_correlation: dict[Any, tuple[int | None, Call]] = {}
    for one in calls:
        index = request_at(one.ts)
        begin = spans[index].start if index is not None else 0.0
        correlation = one.event.get("args", {}).get("correlation")
        name = one.event["name"].partition("_")[0]  # CUPTI may add a version: cudaLaunchKernel_v7000
        start, end = _span(one.event)
        thread = one.event.get("tid", 0)
        call = Call(name, start - begin, end - begin, thread, correlation, one.operator, one.line, one.head)
        if index is not None:
            own_calls[index].append(call)
        if correlation is not None:
            by_correlation[correlation] = index, call
    own_work: list[list[Work]] = [[] for _ in spans]
    for category, kind in _WORK.items():
        for event in by_category[category]:
            arguments = event.get("args", {})
            launched = by_correlation.get(arguments.get("correlation"))
            index = request_at(float(event["ts"])) if launched is None else launched[0]
            if index is not None:
                call = None if launched is None else launched[1]
                own_work[index].append(_work(kind, event, arguments, spans[index].start, call))
    own_waits: list[list[Wait]] = [[] for _ in spans]
    for event in by_category["cuda_sync"]:
        index, arguments = request_at(float(event["ts"])), event.get("args", {})
        if index is not None and arguments.get("cuda_sync_kind") == "Stream Wait Event":
            other = int(arguments.get("wait_on_stream", -1))
            begin = float(event["ts"]) - spans[index].start
            own_waits[index].append(Wait(begin, int(arguments["stream"]), other if other >= 0 else None))
    requests = []
    for span, its_calls, its_work, its_waits in zip(spans, own_calls, own_work, own_waits, strict=True):
        its_work.sort(key=lambda one: (one.start_us, one.end_us))
        last_call = max((one.end_us for one in its_calls), default=0.0)
        returned = min(span.end - span.start, last_call) if its_calls else span.end - span.start
        done = max((one.end_us for one in its_work), default=0.0)
        requests.append(
            Request(span.start, max(done, returned), returned, tuple(its_calls), tuple(its_work), tuple(its_waits))
        )
    return tuple(one for one in requests if one.work) or tuple(requests)


def _work(kind: str, event: _Event, arguments: Mapping[str, Any], begin: float, call: Call | None) -> Work:
    start, end = _span(event)
    return Work(
        kind,
        event["name"],
        start - begin,
        end - begin,
        int(arguments.get("device", 0)),
        int(arguments.get("stream", event.get("tid", 0))),
        call,
        graph=call is not None and call.name in GRAPH_LAUNCHES,
        grid=_sizes(arguments.get("grid")),
        block=_sizes(arguments.get("block")),
        registers=arguments.get("registers per thread"),
        shared_bytes=arguments.get("shared memory"),
    )


def _sizes(found: Any) -> tuple[int, int, int] | None:
    return None if found is None else (int(found[0]), int(found[1]), int(found[2]))
