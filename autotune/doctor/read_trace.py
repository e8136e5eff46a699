"""Reads a Chrome trace of torch.profiler into the requests that findings are made from."""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..measuring.cuda_calls import GRAPH_LAUNCHES, HEAD, plain_name
from .events import Event, Events, other_vendor, read_content, sorted_events
from .requests import BY_ANNOTATION, Cut, Window, cuts
from .sources import user_line
from .trace import BadTrace, Call, Request, Trace, Wait, Work
from .watched import KEY, Watched


class Place(NamedTuple):
    """What a call is made in, innermost first."""

    operator: Event | None = None
    line: str | None = None
    head: str | None = None


def placed_calls(events: Events) -> Iterator[tuple[Event, Place]]:
    """Yield each call with its place, thread by thread.

    Whatever holds a call has begun before it on the same thread, and not ended: one pass with a stack.
    """
    by_thread: dict[str, list[Event]] = defaultdict(list)
    heads = [event for event in events.annotations if event.name.startswith(HEAD)]
    for events_of_kind in (heads, events.functions, events.operators, events.calls):
        for event in events_of_kind:
            by_thread[event.thread].append(event)
    for on_thread in by_thread.values():
        on_thread.sort(key=lambda event: (event.start, -event.end))
        yield from _sweep(on_thread)


def _sweep(events: list[Event]) -> Iterator[tuple[Event, Place]]:
    stack: list[tuple[float, Place]] = []
    nowhere = Place()
    for event in events:
        while stack and stack[-1][0] <= event.start:
            stack.pop()
        place = stack[-1][1] if stack else nowhere
        if event.category in ("cuda_runtime", "cuda_driver"):
            yield event, place
        elif event.category == "cpu_op":
            stack.append((event.end, place._replace(operator=event)))
        elif event.category == "user_annotation":
            stack.append((event.end, place._replace(head=event.name.removeprefix(HEAD))))
        else:
            line = user_line(event.name)
            stack.append((event.end, place if line is None else place._replace(line=line)))


_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}


def read_trace(file: Path) -> Trace:
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
    calls = list(placed_calls(events))
    for cut in cuts(events):
        requests = tuple(request for request in _requests(cut, events, calls) if request.work)
        if requests:
            break
    else:
        raise BadTrace(f"{file}: what its GPU ran was launched by nothing in it; record from before the launches")
    if watched is None and cut.by != BY_ANNOTATION or watched is not None and watched.back_to_back:
        requests = _following(requests)
    properties = content.get("deviceProperties")
    devices = properties if isinstance(properties, list) else []
    return Trace(
        requests=requests,
        cut_by=cut.by,
        devices=tuple(device for device in devices if isinstance(device, dict)),
        has_stacks=bool(events.functions),
        watched=watched,
        warm=cut.warm,
    )


def _watched(content: Mapping[str, Any], file: Path) -> Watched | None:
    if KEY not in content:
        return None
    try:
        return Watched.from_json(content[KEY])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise BadTrace(f'{file}: its key "{KEY}" is not what the doctor writes ({error!r:.80})') from None


def _requests(cut: Cut, events: Events, calls: list[tuple[Event, Place]]) -> list[Request]:
    windows = cut.windows
    starts = [window.start for window in windows]

    def index_at(time: float) -> int | None:
        index = bisect.bisect_right(starts, time) - 1
        return index if index >= 0 and time < windows[index].until else None

    calls_of: list[list[Call]] = [[] for _ in windows]
    launched: dict[int, tuple[int | None, Call | None]] = {}
    for event, place in calls:
        index = index_at(event.start)
        correlation = event.number("correlation")
        call = None
        if index is not None:
            call = _call(event, place, windows[index].start)
            calls_of[index].append(call)
        if correlation is not None:
            launched[correlation] = (index, call)
    work_of: list[list[Work]] = [[] for _ in windows]
    for event in events.work:
        correlation = event.number("correlation")
        nobody = (index_at(event.start), None)
        index, call = nobody if correlation is None else launched.get(correlation, nobody)
        if index is not None:
            work_of[index].append(_work(event, call, windows[index].start))
    waits_of: list[list[Wait]] = [[] for _ in windows]
    for event in events.synchronisations:
        index, stream = index_at(event.start), event.number("stream")
        if event.name == "Stream Wait Event" and index is not None and stream is not None:
            waits_of[index].append(Wait(event.start - windows[index].start, stream))
    return [
        _request(window, sorted(found, key=lambda call: call.start_us), work, waits)
        for window, found, work, waits in zip(windows, calls_of, work_of, waits_of, strict=True)
    ]


def _following(requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Return requests, each with the beginning of the next one's work."""
    begins = [one.start_us + min(work.start_us for work in one.work) for one in requests]
    followed = (replace(one, next_us=begin - one.start_us) for one, begin in zip(requests, begins[1:], strict=False))
    return (*followed, requests[-1])


def _request(window: Window, calls: list[Call], work: list[Work], waits: list[Wait]) -> Request:
    returned = window.returned - window.start
    if not window.exact:
        returned = max([returned, *(one.call.end_us for one in work if one.call is not None)])
    end = max((one.end_us for one in work), default=0.0)
    return Request(window.start, max(returned, end), tuple(calls), tuple(work), tuple(waits))


def _call(event: Event, place: Place, start: float) -> Call:
    operator = place.operator
    return Call(
        name=plain_name(event.name),
        start_us=event.start - start,
        end_us=event.end - start,
        thread=event.tid,
        correlation=event.number("correlation"),
        operator=None if operator is None else operator.name,
        line=place.line,
        operator_us=None if operator is None else (operator.start - start, operator.end - start),
        head=place.head,
    )


def _work(event: Event, call: Call | None, start: float) -> Work:
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
    if not isinstance(sizes, list) or len(sizes) != 3 or not all(isinstance(size, int) for size in sizes):
        return None
    x, y, z = sizes
    return x, y, z
