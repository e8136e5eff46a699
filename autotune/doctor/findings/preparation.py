"""Findings of what belongs before the first request: memory, pageable copies, captures, cuDNN's trials."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from ...measuring.cuda_calls import ALLOCATIONS, CAPTURE_BEGINS, INSTANTIATIONS, POOLED_ALLOCATIONS
from ...records.intervals import Interval, length
from ..trace import ApiCall, Trace, TracedRequest, Work
from .finding import Finding, found, host_marks, marks_of, once_each, times, us
from .host import blocking_copies
from .requests import captures, holds, launched_in, set_up, steady_from_us, trials, where_any

#: Copies that cost the host less a request are none.
_LEAST_US = 5.0


def find_allocations(trace: Trace) -> Iterator[Finding]:
    """Find calls that take memory from the driver or give it back, in most requests."""

    def allocations(request: TracedRequest) -> list[ApiCall]:
        begin, others = steady_from_us(trace, request), set_up(request)
        calls = [call for call in request.calls if call.name in ALLOCATIONS - POOLED_ALLOCATIONS]
        return [call for call in calls if call.start_us >= begin and not holds(others, call.start_us)]

    def host_us(calls: list[ApiCall]) -> float:
        return sum(call.end_us - call.start_us for call in calls)

    cost = trace.median_us(lambda request: host_us(allocations(request)))
    if not cost:
        return
    calls = where_any(trace, allocations)
    counts = Counter(call.name for call in calls)
    evidence = []
    for name, count in counts.most_common():
        of_name = [call for call in calls if call.name == name]
        operators = ", ".join(once_each(call.operator for call in of_name))
        told = f"{name} {times(count)} a request, {us(host_us(of_name))} of the host"
        evidence.append(f"{told}, in {operators}" if operators else told)
    yield found(
        "allocation",
        "Memory is taken from the driver or given back within a request, where most such calls wait for the device: "
        f"{', '.join(counts)}.",
        evidence,
        cost,
        (call.line for call in calls),
        host_marks((call.start_us, call.end_us) for call in calls),
    )


def find_pageable_copies(trace: Trace) -> Iterator[Finding]:
    """Find copies from or to pageable memory; one that reads the answer is none, nor one that a host wait reads."""

    def copies(request: TracedRequest) -> list[tuple[Work, ApiCall, float]]:
        """Copies, with their calls and when the host has done with each."""
        begin, others, launched = steady_from_us(trace, request), set_up(request), launched_in(request)
        waited = {id(copy): wait for wait, copy in blocking_copies(request)}
        pageable = []
        for work in request.work:
            call = work.call
            if work.kind != "copy" or "Pageable" not in work.name or call is None:
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


def find_recaptures(trace: Trace) -> Iterator[Finding]:
    """Find graphs that are captured, instantiated or updated in most requests; in any where the doctor ran them.

    Before those others have run: a service captures for each new length, and a script's module may be called several
    times a request.
    """

    def stretches(request: TracedRequest) -> list[Interval]:
        begin = steady_from_us(trace, request)
        return [stretch for stretch in captures(request) if stretch[0] >= begin]

    def capturing_us(request: TracedRequest) -> float:
        return length(stretches(request))

    def calls_within(request: TracedRequest) -> list[ApiCall]:
        calls = [call for call in request.calls if call.name in CAPTURE_BEGINS | INSTANTIATIONS]
        return [call for call in calls if holds(stretches(request), call.start_us)]

    cost = trace.median_us(capturing_us) if trace.watched is None else fmean(map(capturing_us, trace.requests))
    if not cost:
        return
    calls = where_any(trace, calls_within)
    counts = Counter(call.name for call in calls)
    yield found(
        "recapture",
        "A graph is captured or instantiated within a request, which costs more than it saves.",
        (
            *(f"{name} {times(count)} a request" for name, count in counts.most_common()),
            f"from the begin of a capture to the end of its instantiation: {us(cost)} of the host a request",
        ),
        cost,
        (call.line for call in calls),
        host_marks(stretches(trace.shown)),
    )


def find_trials(trace: Trace) -> Iterator[Finding]:
    """Find convolutions in which cuDNN measures its algorithms, in most requests."""

    def steady(request: TracedRequest) -> dict[Interval, list[ApiCall]]:
        begin = steady_from_us(trace, request)
        return {span: calls for span, calls in trials(request).items() if span[0] >= begin}

    cost = trace.median_us(lambda request: sum(end - begin for begin, end in steady(request)))
    if not cost:
        return
    convolutions = [calls for request in trace.requests for calls in steady(request).values()]
    calls = [call for of_one in convolutions for call in of_one]
    operators, requests = Counter(of_one[0].operator for of_one in convolutions), len(trace.requests)
    evidence = [f"{name} tries algorithms {count / requests:.1f} times a request" for name, count in operators.items()]
    waits = sum("Synchronize" in call.name for call in calls)
    evidence.append(f"{waits / requests:.0f} waits for trials, and {us(cost)} of the host, a request")
    yield found(
        "cudnn-benchmark",
        "cuDNN tries its algorithms within a request (torch.backends.cudnn.benchmark): it does for each new shape of "
        "input.",
        evidence,
        cost,
        (call.line for call in calls),
        host_marks(steady(trace.shown)),
    )
