"""Findings of what belongs before the first request: memory, pageable copies, captures, cuDNN's trials."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from ...measuring.cuda_calls import ALLOCATIONS, CAPTURE_BEGINS, INSTANTIATIONS, POOLED_ALLOCATIONS
from ...records.intervals import Interval, length
from ..trace import ApiCall, Trace, TracedRequest, Work
from .finding import Finding, first_few, host_marks, marks_of, once_each, times, us
from .host import blocking_copies
from .requests import Launched, captures, holds, set_up, steady_from_us, trials

#: Copies that cost the host less a request are none.
_LEAST_US = 5.0


def find_allocations(trace: Trace) -> Iterator[Finding]:
    """Find calls that take memory from the driver or give it back, in most requests."""

    def allocations(request: TracedRequest) -> list[ApiCall]:
        begin, others = steady_from_us(trace, request), set_up(request)
        names = ALLOCATIONS - POOLED_ALLOCATIONS
        return [
            call
            for call in request.calls
            if call.name in names and call.start_us >= begin and not holds(others, call.start_us)
        ]

    def host_us(calls: list[ApiCall]) -> float:
        return sum(call.end_us - call.start_us for call in calls)

    cost = trace.median_us(lambda request: host_us(allocations(request)))
    if not cost:
        return
    calls = allocations(trace.shown) or [call for each in trace.requests for call in allocations(each)]
    counts = Counter(call.name for call in calls)
    evidence = []
    for name, count in counts.most_common():
        of_name = [call for call in calls if call.name == name]
        operators = ", ".join(once_each(call.operator for call in of_name))
        told = f"{name} {times(count)} a request, {us(host_us(of_name))} of the host"
        evidence.append(f"{told}, in {operators}" if operators else told)
    yield Finding(
        kind="allocation",
        what=f"Memory is taken from the driver or given back within a request, where most such calls wait for the "
        f"device: {', '.join(counts)}.",
        evidence=first_few(evidence),
        remedy="Take it once, before the first request, and write into it; call neither torch.cuda.empty_cache() "
        "nor pin_memory() in the loop, which make PyTorch give back what it would use again.",
        snippet="pinned = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)  # once\n"
        "x = torch.empty(batch.shape, dtype=batch.dtype, device=device)\n"
        "pinned.copy_(batch)  # in each request\n"
        "x.copy_(pinned, non_blocking=True)\n",
        cost_us=cost,
        lines=once_each(call.line for call in calls),
        marks=host_marks((call.start_us, call.end_us) for call in calls),
    )


def find_pageable_copies(trace: Trace) -> Iterator[Finding]:
    """Find copies from or to pageable memory; one that reads the answer is none, nor one that a host wait reads."""

    def copies(request: TracedRequest) -> list[tuple[Work, ApiCall, float]]:
        """Copies, with their calls and when the host has done with each."""
        begin, others, launched = steady_from_us(trace, request), set_up(request), Launched(request)
        waited = {id(copy): wait for wait, copy in blocking_copies(request)}
        found = []
        for work in request.work:
            call = work.call
            if work.kind != "copy" or "Pageable" not in work.name or call is None:
                continue
            if call.start_us < begin or holds(others, call.start_us):
                continue
            wait = waited.get(id(work))
            if "HtoD" in work.name or (wait is None and launched.goes_on(call.end_us)):
                found.append((work, call, call.end_us if wait is None else wait.end_us))
        return found

    cost = trace.median_us(lambda request: sum(end - call.start_us for _, call, end in copies(request)))
    if cost < _LEAST_US:
        return
    shown = copies(trace.shown) or [copy for each in trace.requests for copy in copies(each)]
    counts = Counter(work.name for work, _, _ in shown)
    evidence = [
        f"{name} {times(count)} a request: {us(sum(work.us for work, _, _ in shown if work.name == name))} on the "
        f"device, {us(sum(end - call.start_us for work, call, end in shown if work.name == name))} of the host"
        for name, count in counts.most_common()
    ]
    yield Finding(
        kind="pageable-copy",
        what="Copies from or to pageable memory keep the host until they are done: it launches nothing meanwhile.",
        evidence=tuple(evidence),
        remedy="Keep what is copied in pinned memory, and copy with non_blocking=True; a DataLoader does it with "
        "pin_memory=True.",
        snippet="pinned = batch.pin_memory()  # once, or DataLoader(..., pin_memory=True)\n"
        "x = pinned.to(device, non_blocking=True)\n",
        cost_us=cost,
        lines=once_each(call.line for _, call, _ in shown),
        marks=marks_of(work for work, _, _ in shown),
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

    cost = trace.median_us(capturing_us) if trace.watched is None else fmean(map(capturing_us, trace.requests))
    if not cost:
        return
    request = trace.shown
    if not stretches(request):
        request = next(each for each in trace.requests if stretches(each))
    shown = stretches(request)
    calls = [
        call for call in request.calls if call.name in CAPTURE_BEGINS | INSTANTIATIONS and holds(shown, call.start_us)
    ]
    counts = Counter(call.name for call in calls)
    yield Finding(
        kind="recapture",
        what="A graph is captured or instantiated within a request, which costs more than it saves.",
        evidence=(
            *(f"{name} {times(count)} a request" for name, count in counts.most_common()),
            f"from the begin of a capture to the end of its instantiation: {us(cost)} of the host a request",
        ),
        remedy="Capture once for each shape of input, keep the graph, and write each request's input into the "
        "tensor that it was captured with.",
        snippet="graphs = {}  # by shape, kept\n"
        "if x.shape not in graphs:\n"
        "    static, graph = x.clone(), torch.cuda.CUDAGraph()\n"
        "    with torch.cuda.graph(graph):\n"
        "        out = model(static)\n"
        "    graphs[x.shape] = static, graph, out\n"
        "static, graph, out = graphs[x.shape]\n"
        "static.copy_(x)\n"
        "graph.replay()\n",
        cost_us=cost,
        lines=once_each(call.line for call in calls),
        marks=host_marks(shown) if request is trace.shown else (),
    )


def find_trials(trace: Trace) -> Iterator[Finding]:
    """Find convolutions in which cuDNN measures its algorithms, in most requests."""

    def found(request: TracedRequest) -> dict[Interval, list[ApiCall]]:
        begin = steady_from_us(trace, request)
        return {span: calls for span, calls in trials(request).items() if span[0] >= begin}

    cost = trace.median_us(lambda request: sum(end - begin for begin, end in found(request)))
    if not cost:
        return
    shown = found(trace.shown)
    calls = [call for each in trace.requests for of_one in found(each).values() for call in of_one]
    operators = Counter(of_one[0].operator for each in trace.requests for of_one in found(each).values())
    requests = len(trace.requests)
    evidence = [f"{name} tries algorithms {count / requests:.1f} times a request" for name, count in operators.items()]
    waits = sum("Synchronize" in call.name for call in calls)
    evidence.append(f"{waits / requests:.0f} waits for trials, and {us(cost)} of the host, a request")
    yield Finding(
        kind="cudnn-benchmark",
        what="cuDNN tries its algorithms within a request (torch.backends.cudnn.benchmark): it does for each new "
        "shape of input.",
        evidence=first_few(evidence),
        remedy="Give inputs of few shapes, each once before the requests that count, or turn the trials off.",
        snippet="torch.backends.cudnn.benchmark = False  # or, for shapes that are known:\n"
        "for size in sizes:\n"
        "    model(torch.zeros(size, device=device))  # once, before the first request\n",
        cost_us=cost,
        lines=once_each(call.line for call in calls),
        marks=host_marks(shown),
    )
