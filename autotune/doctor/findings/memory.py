"""Memory within a request: taken from the driver, or copied from and to pageable memory."""

from collections import Counter

from ...measuring.cuda_calls import ALLOCATIONS, POOLED_ALLOCATIONS
from ..finding import Finding, Mark
from ..trace import Call, Request, Trace, Work
from .device import Launched
from .host import blocking_copies
from .per_request import first_few, median_us, once_each, shown_request, steady_from_us, times, us
from .stretches import holds, set_up

#: Copies that cost the host less a request are none.
_LEAST_US = 5.0


def find_allocations(trace: Trace) -> list[Finding]:
    """Find calls that take memory from the driver or give it back, in most requests."""

    def allocations(request: Request) -> list[Call]:
        begin, others = steady_from_us(trace, request), set_up(request)
        names = ALLOCATIONS - POOLED_ALLOCATIONS
        return [
            call
            for call in request.calls
            if call.name in names and call.start_us >= begin and not holds(others, call.start_us)
        ]

    cost = median_us(trace, lambda request: sum(call.end_us - call.start_us for call in allocations(request)))
    if not cost:
        return []
    calls = allocations(shown_request(trace)) or [call for each in trace.requests for call in allocations(each)]
    counts = Counter(call.name for call in calls)
    evidence = [
        f"{name} {times(count)} a request, "
        f"{us(sum(call.end_us - call.start_us for call in calls if call.name == name))} of the host"
        + _in_operators([call for call in calls if call.name == name])
        for name, count in counts.most_common()
    ]
    return [
        Finding(
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
            marks=tuple(Mark(call.start_us, call.end_us, None) for call in calls),
        )
    ]


def _in_operators(calls: list[Call]) -> str:
    names = once_each(call.operator for call in calls)
    return f", in {', '.join(names)}" if names else ""


def find_pageable_copies(trace: Trace) -> list[Finding]:
    """Find copies from or to pageable memory; one that reads the answer is none, nor one that a host wait reads."""

    def copies(request: Request) -> list[tuple[Work, Call, float]]:
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

    cost = median_us(trace, lambda request: sum(end - call.start_us for _, call, end in copies(request)))
    if cost < _LEAST_US:
        return []
    shown = copies(shown_request(trace)) or [copy for each in trace.requests for copy in copies(each)]
    counts = Counter(work.name for work, _, _ in shown)
    evidence = [
        f"{name} {times(count)} a request: {us(sum(work.us for work, _, _ in shown if work.name == name))} on the "
        f"device, {us(sum(end - call.start_us for work, call, end in shown if work.name == name))} of the host"
        for name, count in counts.most_common()
    ]
    return [
        Finding(
            kind="pageable-copy",
            what="Copies from or to pageable memory keep the host until they are done: it launches nothing meanwhile.",
            evidence=tuple(evidence),
            remedy="Keep what is copied in pinned memory, and copy with non_blocking=True; a DataLoader does it with "
            "pin_memory=True.",
            snippet="pinned = batch.pin_memory()  # once, or DataLoader(..., pin_memory=True)\n"
            "x = pinned.to(device, non_blocking=True)\n",
            cost_us=cost,
            lines=once_each(call.line for _, call, _ in shown),
            marks=tuple(Mark(work.start_us, work.end_us, work.stream) for work, _, _ in shown),
        )
    ]
