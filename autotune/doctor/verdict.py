"""The verdict: what a request takes, and what it could take if all that is independent overlapped."""

import statistics
from dataclasses import dataclass

from ..measuring.cuda_calls import LAUNCHES
from ..records.intervals import length
from .findings.causes import busy, by_stream
from .trace import Request, Trace


@dataclass(frozen=True)
class Verdict:
    """Times of a request, microseconds; medians over requests."""

    achieved_us: float
    """From its begin until the device is done; without a profiler if that was measured."""
    trunk_us: float
    """t1: the device computes for the trunk, which is the stream that computes longest, without annotated heads."""
    beside_us: float
    """t2: the same of all else, heads and other streams."""
    possible_us: float
    """max(t1, t2)."""
    launch_us: float
    """The host spends in launches, under the profiler."""
    profiled: bool
    """``achieved_us`` is that under the profiler, which makes it longer."""

    def lines(self) -> list[str]:
        """Return it in sentences."""
        how = ", under the profiler" if self.profiled else ""
        said = [f"A request takes {self.achieved_us:,.0f} us{how}."]
        if self.beside_us:
            said.append(
                f"The GPU computes t1 = {self.trunk_us:,.0f} us for the trunk and t2 = {self.beside_us:,.0f} us for "
                f"heads and side streams: {self.trunk_us + self.beside_us:,.0f} us one after another, at best "
                f"max(t1, t2) = {self.possible_us:,.0f} us side by side."
            )
        else:
            said.append(f"The GPU computes for {self.trunk_us:,.0f} us of it, all on one stream.")
        said.append(f"The host spends {self.launch_us:,.0f} us in launches, under the profiler.")
        return said


def verdict(trace: Trace) -> Verdict:
    """Return the verdict on a trace."""
    trunks, besides = zip(*map(_parts, trace.requests), strict=True)
    trunk, beside = statistics.median(trunks), statistics.median(besides)
    measured = None if trace.watched is None else trace.watched.host_us
    launch = statistics.median(
        sum(call.end_us - call.start_us for call in one.calls if call.name in LAUNCHES) for one in trace.requests
    )
    achieved = statistics.median(one.end_us for one in trace.requests) if measured is None else measured
    return Verdict(achieved, trunk, beside, max(trunk, beside), launch, measured is None)


def _parts(request: Request) -> tuple[float, float]:
    """Return for how long the device works on the trunk, and on what could be beside it."""
    heads = [one for one in request.work if one.call is not None and one.call.head is not None]
    others = [one for one in request.work if one.call is None or one.call.head is None]
    (_, trunk), *sides = by_stream(others).items()
    return length(busy(trunk)), length(busy([*heads, *(one for _, work in sides for one in work)]))
