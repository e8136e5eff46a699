"""Reads a Chrome trace of torch.profiler into the requests that findings are made from."""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..measuring.cuda_calls import GRAPH_LAUNCHES, HEAD, plain_name
from .trace import KEY, ApiCall, BadTrace, Trace, TracedRequest, Wait, Watched, Work
from .trace_events import (
    BY_ANNOTATION,
    CALLS,
    Partition,
    TraceEvent,
    TraceEvents,
    Window,
    other_vendor,
    partitions,
    read_content,
    sorted_events,
)
from .user_code import profiled_line


class CallSite(NamedTuple):
    """What a call is made in, innermost first."""

    operator: TraceEvent | None = None
    line: str | None = None
    head: str | None = None


def located_calls(events: TraceEvents) -> Iterator[tuple[TraceEvent, CallSite]]:
    """Yield each call with its site, thread by thread.

    Whatever holds a call has begun before it on the same thread, and not ended: one pass with a stack.
    """
    by_thread: dict[str, list[TraceEvent]] = defaultdict(list)
    heads = [event for event in events.annotations if event.name.startswith(HEAD)]
    for events_of_kind in (heads, events.functions, events.operators, events.calls):
        for event in events_of_kind:
            by_thread[event.thread].append(event)
    for on_thread in by_thread.values():
        on_thread.sort(key=lambda event: (event.start, -event.end))
        yield from _sweep(on_thread)


def _sweep(events: list[TraceEvent]) -> Iterator[tuple[TraceEvent, CallSite]]:
    stack: list[tuple[float, CallSite]] = []
    nowhere = CallSite()
    for event in events:
        while stack and stack[-1][0] <= event.start:
            stack.pop()
        site = stack[-1][1] if stack else nowhere
        if event.category in CALLS:
            yield event, site
        elif event.category == "cpu_op":
            stack.append((event.end, site._replace(operator=event)))
        elif event.category == "user_annotation":
            stack.append((event.end, site._replace(head=event.name.removeprefix(HEAD))))
        else:
            line = profiled_line(event.name)
            stack.append((event.end, site if line is None else site._replace(line=line)))


_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}


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
    if (told := other_vendor(content)) is not None:
        raise BadTrace(
            f"{file}: is of another vendor's device ({told!r:.60}); wants a trace of an NVIDIA GPU: the doctor knows "
            "CUDA's calls alone"
        )
    events = sorted_events(content)
    if not events.work:
        raise BadTrace(
            f"{file}: holds no work of a GPU; record with torch.profiler.profile(activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA])"
        )
    if all(one.number("stream") is None for one in events.work):
        raise BadTrace(f"{file}: tells no stream of what its GPU ran, wants a trace as torch.profiler writes it")
    watched = _watched(content, file)
    calls = list(located_calls(events))
    for partition in partitions(events):
        requests = tuple(request for request in _requests(partition, events, calls) if request.work)
        if requests:
            break
    else:
        raise BadTrace(f"{file}: what its GPU ran was launched by nothing in it; record from before the launches")
    if watched is None and partition.by != BY_ANNOTATION or watched is not None and watched.back_to_back:
        requests = _following(requests)
    properties = content.get("deviceProperties")
    devices = [one for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    return Trace(requests, partition.by, tuple(devices), bool(events.functions), watched, partition.warm)


def _watched(content: Mapping[str, Any], file: Path) -> Watched | None:
    if KEY not in content:
        return None
    try:
        return Watched.from_json(content[KEY])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BadTrace(f'{file}: its key "{KEY}" is not what the doctor writes ({error!r:.80})') from None


def _requests(
    partition: Partition, events: TraceEvents, calls: list[tuple[TraceEvent, CallSite]]
) -> list[TracedRequest]:
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
    for event in events.work:
        nobody, correlation = (index_at(event.start), None), event.number("correlation")
        index, call = nobody if correlation is None else launched.get(correlation, nobody)
        if index is not None:
            work_of[index].append(_work(event, call, starts[index]))
    for event in events.synchronisations:
        index, stream = index_at(event.start), event.number("stream")
        if event.name == "Stream Wait Event" and index is not None and stream is not None:
            waits_of[index].append(Wait(event.start - starts[index], stream))
    return [_request(*parts) for parts in zip(windows, calls_of, work_of, waits_of, strict=True)]


def _following(requests: tuple[TracedRequest, ...]) -> tuple[TracedRequest, ...]:
    """Return requests, each with the beginning of the next one's work."""
    begins = [one.start_us + min(work.start_us for work in one.work) for one in requests]
    followed = (replace(one, next_us=begin - one.start_us) for one, begin in zip(requests, begins[1:], strict=False))
    return (*followed, requests[-1])


def _request(window: Window, calls: list[ApiCall], work: list[Work], waits: list[Wait]) -> TracedRequest:
    ends = [window.returned - window.start, *(one.end_us for one in work)]
    if not window.exact:
        ends += [one.call.end_us for one in work if one.call is not None]
    calls.sort(key=lambda call: call.start_us)
    return TracedRequest(window.start, max(ends), tuple(calls), tuple(work), tuple(waits))


def _call(event: TraceEvent, site: CallSite, start: float) -> ApiCall:
    operator = site.operator
    return ApiCall(
        name=plain_name(event.name),
        start_us=event.start - start,
        end_us=event.end - start,
        thread=event.tid,
        operator=None if operator is None else operator.name,
        line=site.line,
        operator_us=None if operator is None else (operator.start - start, operator.end - start),
        head=site.head,
    )


def _work(event: TraceEvent, call: ApiCall | None, start: float) -> Work:
    return Work(
        kind=_KINDS[event.category],
        name=event.name,
        start_us=event.start - start,
        end_us=event.end - start,
        device=event.number("device") or 0,
        stream=event.number("stream") or 0,
        call=call,
        graph=call is not None and call.name in GRAPH_LAUNCHES,
        grid=_three(event.args.get("grid")),
        block=_three(event.args.get("block")),
        registers=event.number("registers per thread"),
        shared_bytes=event.number("shared memory"),
    )


def _three(sizes: Any) -> tuple[int, int, int] | None:
    if isinstance(sizes, list) and len(sizes) == 3 and all(isinstance(size, int) for size in sizes):
        return tuple(sizes)
    return None
