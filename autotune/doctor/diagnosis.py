"""Diagnosis of a trace: its findings in order, the verdict on a request's time, and how far all of them spread."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import NamedTuple

from ..records.summaries import percentiles
from .findings.copies import find_pageable_copies, find_synchronous_copies
from .findings.finding import Finding, us
from .findings.heads import find_fusible_heads, find_gate_waits
from .findings.host import find_host_waits, find_launch_bound
from .findings.kernels import find_casts, find_float32, find_transposes
from .findings.kinds import KINDS, WRONG, place_of_finding
from .findings.occupancy import find_full_device
from .findings.preparation import find_allocations, find_recaptures, find_trials
from .findings.requests import Busy, library_streams, trunk_stream
from .findings.streams import find_default_stream, find_noticed, find_priorities, find_races
from .findings.timings import find_collections, find_jitter, find_loads
from .trace import Stream, Trace, TracedRequest

_ALL: tuple[Callable[[Trace], Iterable[Finding]], ...] = (
    *(find_races, find_noticed, find_default_stream, find_priorities, find_launch_bound, find_host_waits),
    *(find_allocations, find_pageable_copies, find_full_device, find_gate_waits, find_fusible_heads),
    *(find_recaptures, find_trials, find_synchronous_copies, find_collections, find_loads, find_jitter),
    *(find_transposes, find_casts, find_float32),
)


def find_all(trace: Trace) -> list[Finding]:
    """Return all findings: wrong answers in the order of KINDS, then by cost, and last those whose cost is unknown."""

    def order(finding: Finding) -> tuple[bool, bool, float, int]:
        is_wrong, kind = finding.kind in WRONG, list(KINDS).index(finding.kind)
        return not is_wrong, not is_wrong and finding.cost_us is None, -(finding.cost_us or 0.0) * (not is_wrong), kind

    return sorted((finding for find in _ALL for finding in find(trace)), key=order)


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
        trunk, side, both = us(self.trunk_us), us(self.side_us), us(self.overlapped_us)
        if not self.is_split and not self.overlapped_us:
            parts = [
                f"Everything takes {trunk} of the device, one kernel after another; a graph does not tell heads from "
                "the trunk."
            ]
        elif not self.is_split:
            parts = [
                f"Kernels and copies take {trunk} together; for {both} of it others run at the same time. A trace of a "
                "graph does not tell which branch a kernel is of."
            ]
        elif not self.side_us:
            parts = [
                f"Everything takes {trunk} of the device: no kernel is known to be of a head, and no stream beside the "
                "trunk's has work."
            ]
        else:
            parts = [
                f"The trunk takes {trunk} of the device and everything else {side}: one beside the other they could "
                f"take {us(self.possible_us)}.",
                f"Both run at once for {both}.",
            ]
        return (took, *parts, launching)


def weigh(trace: Trace) -> Verdict:
    """Weigh what a request takes against what it would take with everything beside the trunk."""
    rows, is_split = _times(trace)
    watched_us = trace.seen.host_us
    achieved_us = trace.median_us(lambda request: request.end_us) if watched_us is None else watched_us
    span_us, trunk_us, side_us, launching_us, overlapped_us = map(median_low, zip(*rows, strict=True))
    return Verdict(achieved_us, watched_us is None, span_us, trunk_us, side_us, launching_us, overlapped_us, is_split)


def spread_of_times(trace: Trace) -> dict[str, tuple[float, float]]:
    """Return within which values times of the verdict lie, by name.

    Of requests that were timed without a profiler the 20th and 80th percentile, of those in the trace, of which there
    are few, the shortest and the longest.
    """
    rows, _ = _times(trace)
    samples = trace.seen.samples_us
    amounts = {
        "achieved_us": [*samples] or [request.end_us for request in trace.requests],
        "trunk_us": [row.trunk_us for row in rows],
        "side_us": [row.side_us for row in rows],
        "busy_us": [row.trunk_us + row.side_us - row.overlapped_us for row in rows],
    }
    spreads = {name: (min(values), max(values)) for name, values in amounts.items()}
    if samples:
        spreads["achieved_us"] = percentiles(samples)[1:]
    return spreads


def with_spreads(trace: Trace, findings: Sequence[Finding]) -> list[Finding]:
    """Return findings of a trace with the least and the most that each costs a request, by what is found in each."""
    alone = [find_all(replace(trace, requests=(request,))) for request in trace.requests]
    costs: dict[tuple[str, str], list[list[float]]] = {}
    for place in {_place(one) for one in findings}:
        costs[place] = [[one.cost_us or 0.0 for one in here if _place(one) == place] for here in alone]
    spread: list[Finding] = []
    for one in findings:
        if one.cost_us is not None and one.spread_us is None:
            rank = sum(_place(before) == _place(one) for before in spread)  # those of one place, the most costly first
            amounts = [here[rank] if rank < len(here) else 0.0 for here in costs[_place(one)]]
            one = replace(one, spread_us=(min(amounts), max(amounts)))
        spread.append(one)
    return spread


def _place(finding: Finding) -> tuple[str, str]:
    return place_of_finding(finding.kind, finding.lines)


class _Times(NamedTuple):
    """Of one request, as :class:`Verdict` has them."""

    span_us: float
    trunk_us: float
    side_us: float
    launch_bound_us: float
    overlapped_us: float


def _times(trace: Trace) -> tuple[list[_Times], bool]:
    """Return the times of each request, and whether trunk and side are told apart in all of them."""
    trunk = trunk_stream(trace)
    parts = [_parts(request, trunk) for request in trace.requests]
    is_split = all(is_told_apart for *_, is_told_apart in parts)
    rows = []
    for request, (of_trunk, beside, _) in zip(trace.requests, parts, strict=True):
        busy = Busy(request.work)
        trunk_us, side_us = (of_trunk.us, beside.us) if is_split else (sum(work.us for work in request.work), 0.0)
        calls = {id(work.call): work.call for work in request.work if work.call is not None}
        launching_us = sum(call.end_us - call.start_us for call in calls.values())
        span_us = busy.intervals[-1][1] - busy.intervals[0][0]
        rows.append(_Times(span_us, trunk_us, side_us, launching_us, trunk_us + side_us - busy.us))
    return rows, is_split


def _parts(request: TracedRequest, trunk: Stream | None) -> tuple[Busy, Busy, bool]:
    """Return when the trunk and all else are busy, and whether they can be told apart.

    If graphs run on several streams, the trunk goes on on any of them after a fork.
    """
    in_graphs = [work for work in request.work if work.graph]
    of_graphs = {work.on for work in in_graphs}
    own = {trunk, *(of_graphs if len(of_graphs) > 1 else ()), *library_streams(request)}
    beside = [work for work in request.work if work.is_head or work.on not in own]
    of_trunk = [work for work in request.work if not work.is_head and work.on in own]
    is_told_apart = not in_graphs or any(work.is_head for work in in_graphs) or bool(beside) and len(of_graphs) == 1
    return Busy(of_trunk), Busy(beside), is_told_apart
