"""The verdict on a trace: how long a request takes, and how long it would if what is apart ran beside the rest."""

from dataclasses import dataclass
from statistics import median_low

from .findings.device import Busy, Stream, intervals, library_streams, stream_of, trunk_stream
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
    """Device time of the trunk: of its stream, heads aside; if ``is_split`` is False, of all work together."""
    side_us: float
    """Device time of everything else: heads, and other streams; 0 if ``is_split`` is False."""
    launch_bound_us: float
    """Host time of all calls that launch something, with the profiler on: no request is shorter without a graph."""
    overlapped_us: float
    """For how long trunk and side run at once, or, if ``is_split`` is False, any work beside other."""
    is_split: bool
    """False: a graph in which no kernel is known to be of a head, and nothing beside it. The driver runs a graph's
    kernels on streams of its choice, so that a trace does not tell which branch one is of."""

    @property
    def possible_us(self) -> float:
        """The longer of the trunk and everything else: what it takes if one runs beside the other.

        If they are not told apart, how long the device is busy.
        """
        return max(self.trunk_us, self.side_us) if self.is_split else self.busy_us

    @property
    def busy_us(self) -> float:
        """How long the device runs anything."""
        return self.trunk_us + self.side_us - self.overlapped_us

    def sentences(self) -> tuple[str, ...]:
        """Return the verdict in words, a sentence each."""
        how, profiled = (
            ("with the profiler on", "") if self.profiled else ("without a profiler", "with the profiler on, ")
        )
        took = (
            f"A request takes {us(self.achieved_us)} ({how}); {profiled}{us(self.span_us)} pass from its first kernel "
            f"to its last, of which the device works {us(self.busy_us)}."
        )
        launching = f"Launching takes {us(self.launch_bound_us)} of the host, with the profiler on."
        parts: tuple[str, ...]
        if not self.is_split and not self.overlapped_us:
            parts = (
                f"Everything takes {us(self.trunk_us)} of the device, one kernel after another; a graph does not tell "
                "heads from the trunk.",
            )
        elif not self.is_split:
            parts = (
                f"Kernels and copies take {us(self.trunk_us)} together; for {us(self.overlapped_us)} of it others run "
                "at the same time. A trace of a graph does not tell which branch a kernel is of.",
            )
        elif not self.side_us:
            parts = (
                f"Everything takes {us(self.trunk_us)} of the device: no kernel is known to be of a head, and no "
                "stream beside the trunk's has work.",
            )
        else:
            parts = (
                f"The trunk takes {us(self.trunk_us)} of the device and everything else {us(self.side_us)}: one beside "
                f"the other they could take {us(self.possible_us)}.",
                f"Both run at once for {us(self.overlapped_us)}.",
            )
        return (took, *parts, launching)


def verdict(trace: Trace) -> Verdict:
    """Weigh what a request takes against what it would take with everything beside the trunk."""
    trunk = trunk_stream(trace)

    def parts(request: Request) -> tuple[Busy, Busy]:
        of_trunk = {trunk, *_streams_of_graphs(request), *library_streams(request)}
        sides: list[Work] = []
        trunks: list[Work] = []
        for work in request.work:
            (sides if work.is_head or stream_of(work) not in of_trunk else trunks).append(work)
        return Busy(trunks), Busy(sides)

    parts_of = {id(request): parts(request) for request in trace.requests}
    is_split = all(_is_split(request, bool(parts_of[id(request)][1].intervals)) for request in trace.requests)

    def launching_us(request: Request) -> float:
        calls = {id(work.call): work.call for work in request.work if work.call is not None}
        return sum(call.end_us - call.start_us for call in calls.values())

    def span_us(request: Request) -> float:
        union = intervals(list(request.work))
        return union[-1][1] - union[0][0] if union else 0.0

    def together_us(request: Request) -> float:
        return sum(work.us for work in request.work)

    def overlapped_us(request: Request) -> float:
        mine, other = parts_of[id(request)]
        together = mine.us + other.us if is_split else together_us(request)
        return together - Busy(list(request.work)).us

    watched_us = trace.seen.host_us
    return Verdict(
        achieved_us=median_low(request.end_us for request in trace.requests) if watched_us is None else watched_us,
        profiled=watched_us is None,
        span_us=median_us(trace, span_us),
        trunk_us=median_us(trace, lambda request: parts_of[id(request)][0].us if is_split else together_us(request)),
        side_us=median_us(trace, lambda request: parts_of[id(request)][1].us if is_split else 0.0),
        launch_bound_us=median_us(trace, launching_us),
        overlapped_us=median_us(trace, overlapped_us),
        is_split=is_split,
    )


def _streams_of_graphs(request: Request) -> set[Stream]:
    """Return the streams that graphs run on, if there are several: the trunk goes on on any of them after a fork."""
    found = {stream_of(work) for work in request.work if work.graph}
    return found if len(found) > 1 else set()


def _is_split(request: Request, has_side: bool) -> bool:
    """Return whether trunk and side can be told apart."""
    in_graphs = [work for work in request.work if work.graph]
    if not in_graphs or any(work.is_head for work in in_graphs):
        return True
    return has_side and not _streams_of_graphs(request)
