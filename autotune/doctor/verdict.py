"""The verdict on a trace: how long a request takes, and how long it would if what is apart ran beside the rest."""

from dataclasses import dataclass
from statistics import median_low

from .findings.device import Busy, intervals, stream_of, trunk_stream
from .findings.per_request import median_us, us
from .trace import Request, Trace, Work


@dataclass(frozen=True)
class Verdict:
    """Times of a request, microseconds: medians over the requests of a trace."""

    achieved_us: float
    """From its begin until the device and the host are done; without a profiler where that was measured."""
    profiled: bool
    """The achieved time has the profiler in it, which makes launches slower."""
    span_us: float
    """From the device's first work to its last, in the trace."""
    trunk_us: float
    """Device time of the trunk: of its stream, heads aside."""
    side_us: float
    """Device time of everything else: heads, and other streams."""
    launch_bound_us: float
    """Host time of all calls that launch something, with the profiler on: no request is shorter without a graph."""
    overlapped_us: float
    """For how long trunk and side run at once."""

    @property
    def possible_us(self) -> float:
        """The longer of the trunk and everything else: what it takes if one runs beside the other."""
        return max(self.trunk_us, self.side_us)

    def sentences(self) -> tuple[str, ...]:
        """Return the verdict in words, a sentence each."""
        how = "with the profiler on" if self.profiled else "without a profiler"
        found = [
            f"A request takes {us(self.achieved_us)} ({how}); the device works on it for {us(self.span_us)}, from its "
            "first kernel to its last.",
            f"The trunk takes {us(self.trunk_us)} of the device and everything else {us(self.side_us)}: one beside the "
            f"other they could take {us(self.possible_us)}.",
            f"Both run at once for {us(self.overlapped_us)}.",
            f"Launching takes {us(self.launch_bound_us)} of the host, with the profiler on.",
        ]
        return tuple(found if self.side_us else (found[0], f"The trunk takes {us(self.trunk_us)}.", found[3]))


def verdict(trace: Trace) -> Verdict:
    """Weigh what a request takes against what it would take with everything beside the trunk."""
    trunk = trunk_stream(trace)

    def parts(request: Request) -> tuple[Busy, Busy]:
        sides: list[Work] = []
        trunks: list[Work] = []
        for work in request.work:
            in_head = work.call is not None and work.call.head is not None
            (sides if in_head or (trunk is not None and stream_of(work) != trunk) else trunks).append(work)
        return Busy(trunks), Busy(sides)

    def launching_us(request: Request) -> float:
        calls = {id(work.call): work.call for work in request.work if work.call is not None}
        return sum(call.end_us - call.start_us for call in calls.values())

    def span_us(request: Request) -> float:
        union = intervals(list(request.work))
        return union[-1][1] - union[0][0] if union else 0.0

    def overlapped_us(request: Request) -> float:
        mine, other = parts(request)
        return mine.us + other.us - Busy(list(request.work)).us

    watched_us = None if trace.watched is None else trace.watched.host_us
    return Verdict(
        achieved_us=median_low(request.end_us for request in trace.requests) if watched_us is None else watched_us,
        profiled=watched_us is None,
        span_us=median_us(trace, span_us),
        trunk_us=median_us(trace, lambda request: parts(request)[0].us),
        side_us=median_us(trace, lambda request: parts(request)[1].us),
        launch_bound_us=median_us(trace, launching_us),
        overlapped_us=median_us(trace, overlapped_us),
    )
