"""Requests that last as long as the host takes to launch them."""

from statistics import median
from typing import NamedTuple

from ...records.intervals import Interval, merged
from ..finding import Finding, Mark
from ..trace import Request, Trace
from .device import Busy, Launched, kernels
from .host import host_waits
from .per_request import median_us, shown_request, us
from .stretches import set_up

#: The device is idle for more than this share of a request.
_IDLE_SHARE = 0.3
#: At least this share of that, it waits for the next launch.
_WAITING_SHARE = 0.5
#: A kernel that begins so soon after its launch began, or ended, was not waited for by any other.
_AFTER_BEGIN_US, _AFTER_END_US = 15.0, 15.0
#: What a launch of eager PyTorch takes the host without a profiler (12 on ResNet-18, H200); a profiler trebles it.
_LAUNCH_US = 10.0
#: Fewer launches are bound by something else.
_LEAST_LAUNCHES = 10


class Idleness(NamedTuple):
    """How a request's device waits for the host, as the trace has it; times are microseconds."""

    gaps: list[Interval]
    """Pauses that end with a kernel that runs as soon as it is launched."""
    idle_us: float
    span_us: float
    busy_us: float
    launches: int

    @property
    def waiting_us(self) -> float:
        """How long it waits for launches."""
        return sum(end - begin for begin, end in self.gaps)


def idleness(request: Request) -> Idleness:
    """Tell a request's pauses for want of a launch from those in which the host waits or sets something up."""
    busy, launched = Busy(list(request.work)), Launched(request)
    calls = {work.start_us: work.call for work in sorted(request.work, key=lambda work: -work.start_us)}
    others = merged([*set_up(request), *((wait.start_us, wait.call.end_us) for wait in host_waits(request))])
    gaps = []
    for begin, end in busy.gaps():
        call = calls[end]
        if call is None or end > max(call.start_us + _AFTER_BEGIN_US, call.end_us + _AFTER_END_US):
            continue
        if not any(start < end and begin < stop for start, stop in others):
            gaps.append((begin, end))
    first, last = busy.intervals[0][0], busy.intervals[-1][1]
    return Idleness(gaps, last - first - busy.us, last - first, busy.us, len({id(w.call) for w in launched.work}))


def find_launch_bound(trace: Trace) -> list[Finding]:
    """Find that most requests are bound by their launches: no graph, and a device that waits for the next one."""
    host_us = trace.seen.host_us
    if host_us is not None:  # another process on the host makes some of them longer
        host_us = min([host_us, *trace.seen.samples_us])

    def cost(request: Request) -> float:
        if not request.work or any(work.graph for work in request.work):
            return 0.0
        found = idleness(request)
        # a profiler makes launches slower: the time without it is known, or reckoned
        total = found.launches * _LAUNCH_US if host_us is None else host_us
        idle = min(found.idle_us, total - found.busy_us)
        if found.launches < _LEAST_LAUNCHES or found.idle_us <= _IDLE_SHARE * found.span_us:
            return 0.0
        if idle <= _IDLE_SHARE * total or found.waiting_us < _WAITING_SHARE * found.idle_us:
            return 0.0
        return idle * found.waiting_us / found.idle_us

    cost_us = median_us(trace, cost)
    if not cost_us:
        return []
    request = shown_request(trace)
    found = idleness(request)
    starts = sorted({call.start_us for work in request.work if (call := work.call) is not None})
    apart = median(after - before for before, after in zip(starts, starts[1:], strict=False))
    length = median([work.us for work in kernels(request)] or [0.0])
    told = "as measured without a profiler" if host_us is not None else "at 10 us a launch, for a profiler adds to it"
    return [
        Finding(
            kind="launch-bound",
            what=f"The device waits for launches: a kernel takes {us(length)}, the next one comes after {us(apart)}.",
            evidence=(
                f"{found.launches} launches a request, {us(apart)} apart (median, with the profiler on)",
                f"kernels of {us(length)} (median), {us(found.busy_us)} together",
                f"the device is idle for {us(found.idle_us)} of {us(found.span_us)} in the trace, for "
                f"{us(found.waiting_us)} of it because nothing was launched",
                f"cost {told}",
            ),
            remedy="Launch the request as one CUDA graph, or less and larger kernels: torch.compile, a larger batch, "
            "heads of one launch. Streams gain nothing while launches are what takes the time.",
            snippet="# 1. an EarlyExitNetwork: a runner is such a graph\n"
            "from auxhead.model import make_runner\n\n"
            "runner = make_runner(network, x)\n"
            "out = runner(x)  # in each request\n\n"
            "# 2. any other model\n"
            "graph, static = torch.cuda.CUDAGraph(), x.clone()\n"
            "side = torch.cuda.Stream()\n"
            "side.wait_stream(torch.cuda.current_stream())\n"
            "with torch.no_grad(), torch.cuda.stream(side):\n"
            "    model(static)  # warm-up\n"
            "torch.cuda.current_stream().wait_stream(side)\n"
            "with torch.no_grad(), torch.cuda.graph(graph):\n"
            "    out = model(static)\n"
            "static.copy_(x)  # in each request\n"
            "graph.replay()\n",
            cost_us=cost_us,
            marks=tuple(Mark(begin, end, None) for begin, end in found.gaps),
        )
    ]
