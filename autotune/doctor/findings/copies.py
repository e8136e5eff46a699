"""Findings of copies that keep the host: from or to pageable memory, and by calls that are not asynchronous."""

from collections import Counter
from collections.abc import Iterator

from ...measuring.cuda_calls import is_synchronous_copy
from ..trace import ApiCall, Trace, TracedRequest, Work
from .finding import Finding, found, host_marks, marks_of, times, us
from .host import blocking_copies
from .requests import holds, launched_in, set_up, steady_from_us, where_any

#: Copies that cost the host less a request are none.
_LEAST_US = 5.0


def find_pageable_copies(trace: Trace) -> Iterator[Finding]:
    """Find copies from or to pageable memory; one that reads the answer is none, nor one that a host wait reads."""

    def copies(request: TracedRequest) -> list[tuple[Work, ApiCall, float]]:
        """Copies, with their calls and when the host has done with each."""
        begin, others, launched = steady_from_us(trace, request), set_up(request), launched_in(request)
        waited = {id(copy): wait for wait, copy in blocking_copies(request)}
        pageable = []
        for work in request.work:
            call = work.call
            if work.kind != "copy" or "Pageable" not in work.name or call is None or is_synchronous_copy(call.name):
                continue
            if call.start_us < begin or holds(others, call.start_us):
                continue
            wait = waited.get(id(work))
            if "HtoD" in work.name or (wait is None and launched.goes_on(call.end_us)):
                pageable.append((work, call, call.end_us if wait is None else wait.end_us))
        return pageable

    cost = trace.median_us(lambda request: sum(end - call.start_us for _, call, end in copies(request)))
    if cost < _LEAST_US:
        return
    shown = where_any(trace, copies)
    evidence = [
        f"{name} {times(count)} a request: {us(sum(work.us for work, _, _ in shown if work.name == name))} on the "
        f"device, {us(sum(end - call.start_us for work, call, end in shown if work.name == name))} of the host"
        for name, count in Counter(work.name for work, _, _ in shown).most_common()
    ]
    yield found(
        "pageable-copy",
        "Copies from or to pageable memory keep the host until they are done: it launches nothing meanwhile.",
        evidence,
        cost,
        (call.line for _, call, _ in shown),
        marks_of(work for work, _, _ in shown),
    )


def find_synchronous_copies(trace: Trace) -> Iterator[Finding]:
    """Find copies and fills by calls without Async, in most requests; a copy that reads the answer is none."""

    def calls_of(request: TracedRequest) -> list[ApiCall]:
        begin, others, launched = steady_from_us(trace, request), set_up(request), launched_in(request)
        down = {id(work.call) for work in request.work if work.kind == "copy" and "DtoH" in work.name}
        return [
            call
            for call in request.calls
            if is_synchronous_copy(call.name)
            and call.start_us >= begin
            and not holds(others, call.start_us)
            and (id(call) not in down or launched.goes_on(call.end_us))
        ]

    def host_us(calls: list[ApiCall]) -> float:
        return sum(call.end_us - call.start_us for call in calls)

    cost = trace.median_us(lambda request: host_us(calls_of(request)))
    if cost < _LEAST_US:
        return
    calls = where_any(trace, calls_of)
    counts = Counter(call.name for call in calls)
    yield found(
        "synchronous-copy",
        f"Copies or fills are called without Async, and the host waits within them: {', '.join(counts)}.",
        [
            f"{name} {times(count)} a request, {us(host_us([call for call in calls if call.name == name]))} of the host"
            for name, count in counts.most_common()
        ],
        cost,
        (call.line for call in calls),
        host_marks((call.start_us, call.end_us) for call in calls_of(trace.shown)),
    )
