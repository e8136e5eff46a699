"""Findings on the host: it waits for the device, copies from pageable memory, or launches slower than kernels run."""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from ...measuring.cuda_calls import KERNEL_LAUNCHES, LAUNCHES, SYNCHRONISATIONS
from ...records.intervals import length
from ..finding import Finding
from ..trace import Call, Request, Trace
from .causes import Stretch, busy, causes, kernels, on_host, times
from .graphs import in_capture, in_search

#: Findings of one kind, most costly first; the others are small.
MOST = 5
#: A kernel that begins so soon after its launch found the queue empty, microseconds.
_AT_ONCE_US = 15.0
#: Of a request, the least share that the device is idle for where launches bound it.
_IDLE_SHARE = 0.3
#: Requests of fewer launches are too short to be told from the start of a request.
_LAUNCHES = 5

_WHY = {
    "aten::_local_scalar_dense": ".item(), float(tensor), print or if on a tensor",
    "aten::item": ".item(), float(tensor), print or if on a tensor",
    "aten::nonzero": "nonzero, a mask as an index, or torch.where with one argument",
    "aten::copy_": ".cpu(), .to('cpu') or .numpy()",
    "aten::_to_copy": ".cpu(), .to('cpu') or .numpy()",
}


def find_host_waits(trace: Trace) -> list[Finding]:
    """Find waits for the device behind which more is launched; who waits once all is launched reads the answer."""
    found = []
    for cause in list(causes(trace, lambda request: _waits(trace, request)).values())[:MOST]:
        found.append(
            Finding(
                "host-wait",
                "The host waits for the device and launches nothing until then; after that the device waits for it.",
                (f"{times(cause.times, 'wait')} a request: {'; '.join(cause.evidence)}",),
                "Leave the number on the device until all is launched: compare, choose and stop there, or read it at "
                "the end.",
                "sure = confidence > threshold       # a tensor on the GPU: nobody waits\n"
                "answer = torch.where(sure, early, late)\n"
                'runner = make_runner(network, images, exits="polled")  # or let the heads stop the GPU',
                cause.cost_us,
                cause.lines,
                cause.marks,
            )
        )
    return found


def _waits(trace: Trace, request: Request) -> Iterator[Stretch]:
    launches = [one.start_us for one in request.calls if one.name in LAUNCHES]
    ends = sorted(one.end_us for one in request.work)
    starts = sorted(one.start_us for one in request.work)
    for call in request.calls:
        followed = trace.back_to_back or bisect_left(launches, call.end_us) < len(launches)
        if call.name not in SYNCHRONISATIONS or not followed or in_search(call) or in_capture(request, call):
            continue
        if _pageable_before(request, call):
            continue
        done = bisect_right(ends, call.end_us)
        next_ = bisect_left(starts, call.end_us)
        idle = max(0.0, starts[next_] - max(ends[done - 1], call.start_us)) if done and next_ < len(starts) else 0.0
        why = _WHY.get(call.operator or "", call.operator or "called directly")
        yield Stretch(
            call.line or call.operator or call.name, idle or call.end_us - call.start_us, on_host(call),
            f"{call.name} ({why})", call.line,
        )  # fmt: skip


def _pageable_before(request: Request, wait: Call) -> bool:
    """Tell whether a wait is that of a copy from pageable memory: both are made in one operator."""
    copies = [one.call for one in request.work if one.kind == "copy" and "Pageable" in one.name and "HtoD" in one.name]
    return any(
        one is not None and one.thread == wait.thread and one.operator == wait.operator and
        0.0 <= wait.start_us - one.end_us < 50.0
        for one in copies
    )  # fmt: skip


def find_pageable_copies(trace: Trace) -> list[Finding]:
    """Find copies from memory that the driver has to copy once more before the device can read it."""

    def copies(request: Request) -> Iterator[Stretch]:
        for one in request.work:
            if one.kind != "copy" or "HtoD" not in one.name or "Pageable" not in one.name or one.call is None:
                continue
            waits = [call for call in request.calls if call.name in SYNCHRONISATIONS]
            after = [call for call in waits if 0.0 <= call.start_us - one.call.end_us < 50.0]
            end = after[0].end_us if after else one.call.end_us
            line = one.call.line
            yield Stretch(line or "copy", end - one.call.start_us, on_host(one.call, end), one.name, line)

    return [
        Finding(
            "pageable-copy",
            "A copy to the device comes from pageable memory: the driver copies it twice, and the host waits.",
            (f"{times(cause.times, 'copy' if cause.times == 1 else 'copie')} a request: {'; '.join(cause.evidence)}",),
            "Pin the memory once, outside of the loop, and copy without waiting.",
            "loader = DataLoader(data, pin_memory=True)\nx = x.to(device, non_blocking=True)  # x is pinned",
            cause.cost_us,
            cause.lines,
            cause.marks,
        )
        for cause in list(causes(trace, copies).values())[:MOST]
    ]


def find_launch_bound(trace: Trace) -> list[Finding]:
    """Find requests in which the device waits for launches: what counts is the time without a profiler, if known."""
    requests = [one for one in trace.requests if _launched_one_by_one(one)]
    if 2 * len(requests) <= len(trace.requests):
        return []
    waits = sum(one.cost_us for one in find_host_waits(trace))
    idle, shares = [], []
    for request in requests:
        running = length(busy(request.work))
        measured = trace.watched.host_us if trace.watched is not None else None
        took = request.work[-1].end_us - request.work[0].start_us if measured is None else measured
        idle.append(took - running - waits)
        shares.append(idle[-1] / took)
    if statistics.median(shares) < _IDLE_SHARE:
        return []
    shown = trace.shown
    launches = [one for one in shown.calls if one.name in KERNEL_LAUNCHES]
    between = [after.start_us - before.start_us for before, after in zip(launches, launches[1:], strict=False)]
    evidence = (
        f"{len(launches)} launches in a request, one each {statistics.median(between):.1f} us (median, profiled); the "
        f"kernels take {statistics.median(one.us for one in kernels(shown)):.1f} us",
        f"the device is idle for {100 * statistics.median(shares):.0f} % of a request, waits of the host left out",
    )
    return [
        Finding(
            "launch-bound",
            "Kernels are shorter than their launches: the device waits for the host, and streams cannot help.",
            evidence,
            "Launch all of it by one call: a CUDA graph. Only then do streams have something to overlap.",
            "with torch.cuda.graph(graph):  # after a few warm-up calls on a side stream\n"
            "    answers = model(static_input)\n"
            "graph.replay()\n"
            "runner = make_runner(network, images)  # or auxhead's, which capture graphs with their heads",
            statistics.median(idle),
        )
    ]


def _launched_one_by_one(request: Request) -> bool:
    """Tell whether most kernels found an empty queue and none, or few, are of a graph."""
    launched = [one for one in kernels(request) if one.call is not None and not in_search(one.call)]
    if len(launched) < _LAUNCHES or 2 * sum(one.graph for one in launched) > len(launched):
        return False
    at_once = sum(one.call is not None and one.start_us - one.call.start_us < _AT_ONCE_US for one in launched)
    return 2 * at_once > len(launched)
