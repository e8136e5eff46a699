"""Layouts of a network on several GPUs: cuts, GPUs a stage, replicas and split size, the fastest by simulation first.

    load of a stage = (its time + the links it takes part in) x micro-batches that come, all of them full

For each number of GPUs that a replica may have, all cuts and all numbers of GPUs a stage are searched for the smallest
largest load / GPUs, by dynamic programming. The few best are simulated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import nsmallest
from itertools import accumulate
from typing import NamedTuple

from ...model.parallel.pipeline.placement import merges_of
from ..pipelines.simulate import Prediction, StageTimes, bound, simulate

#: Layouts of one split size and number of GPUs that are simulated.
_SIMULATED = 4


class HostTimes(NamedTuple):
    """What the hosts of a pipeline of several stages take, in ms; see :class:`StageTimes` and :func:`simulate`."""

    hand_on_ms: float = 0.0
    """To hand a micro-batch on."""
    request_ms: float = 0.0
    """For each request besides."""


#: Hosts that take no time.
INSTANT = HostTimes()


@dataclass(frozen=True)
class SegmentTimes:
    """What the segments of a network take for micro-batches of one size."""

    split_size: int
    segment_ms: Sequence[float]
    """Of each segment, its head included."""
    turn_ms: float
    """Of each stage beside its segments: launches, and the host, which reads the answers."""
    handing_ms: Sequence[float]
    """Behind each segment but the last: for copying what is handed over out of a stage's memory, or into one's."""
    gathering_ms: Sequence[float | None]
    """The same: for merging; None where rows are no samples and cannot be merged."""
    link_ms: Sequence[float]
    """The same: for the way to another GPU."""

    def stage_ms(self, first: int, end: int) -> float:
        """Return the time of a stage with the segments from ``first`` up to ``end``."""
        handing = sum(self.handing_ms[cut - 1] for cut in (first, end) if 0 < cut < len(self.segment_ms))
        return self.turn_ms + sum(self.segment_ms[first:end]) + handing


@dataclass(frozen=True)
class Layout:
    """A way to run a network on several GPUs, and how fast it is."""

    split_size: int
    starts: tuple[int, ...]
    """The first segment of each stage."""
    stages: tuple[StageTimes, ...]
    replicas: int
    prediction: Prediction
    bound: float
    """Images a second, see :func:`bound`."""

    @property
    def gpus(self) -> int:
        """How many it uses."""
        return self.replicas * sum(stage.gpus for stage in self.stages)

    @property
    def runs_today(self) -> bool:
        """Whether ``pipelined`` can run it: it has a GPU for each stage."""
        return all(stage.gpus == 1 for stage in self.stages)

    @property
    def busy(self) -> float:
        """The share of the time that its GPUs compute, on average."""
        of_stages = zip(self.prediction.busy, self.stages, strict=True)
        return self.replicas * sum(share * stage.gpus for share, stage in of_stages) / self.gpus


def best_layouts(
    times: Sequence[SegmentTimes],
    shares: Sequence[float],
    batch: int,
    gpus: int,
    hosts: HostTimes = INSTANT,
) -> list[Layout]:
    """Return layouts, most images a second first: the best for each number of stages, replicas and GPUs a stage.

    Args:
        times: of each split size.
        shares: of the samples that leave at each exit, the classifier last, 0 to 1.
        batch: samples of a request; one comes to a replica when the one before is answered.
        gpus: how many there are; a layout may leave some idle.
        hosts: of pipelines.
    """
    best: dict[tuple[object, ...], Layout] = {}
    open_shares = [max(0.0, 1.0 - left) for left in accumulate(shares[:-1], initial=0.0)]
    for of_size in times:
        cuts = _Cuts(of_size, open_shares, batch)
        for each in range(1, gpus + 1):
            replicas = gpus // each
            # more stages than segments there are not, and more GPUs in as many replicas are at least as good
            if each > len(open_shares) and each != gpus // replicas:
                continue
            for cut in {*cuts.fastest(each, one_each=True), *cuts.fastest(each, one_each=False)}:
                layout = _simulated(of_size, open_shares, batch, cut, replicas, hosts)
                key = len(layout.stages), replicas, layout.runs_today
                if key not in best or layout.prediction.images_per_s > best[key].prediction.images_per_s:
                    best[key] = layout
    # of equally fast ones the simplest
    return sorted(best.values(), key=lambda one: (-one.prediction.images_per_s, len(one.stages), one.gpus))


#: Of each stage its first segment and its number of GPUs.
_Cut = tuple[tuple[int, int], ...]


class _Cuts:
    """Finds cuts and numbers of GPUs with small loads, for one split size."""

    def __init__(self, times: SegmentTimes, open_shares: Sequence[float], batch: int) -> None:
        self._times, self._segments = times, len(open_shares)
        movable = [True, *(ms is not None for ms in times.gathering_ms)]
        came = [batch * (share if moves else 1.0) for share, moves in zip(open_shares, movable, strict=True)]
        self._micro_batches = [-(-samples // times.split_size) for samples in came]
        self._search = cache(self._search_all)

    def fastest(self, gpus: int, *, one_each: bool) -> list[_Cut]:
        """Return those with the smallest loads that use so many GPUs; none if there are no such cuts."""
        return [cut for _, cut in self._search(0, gpus, one_each)]

    def _search_all(self, first: int, gpus: int, one_each: bool) -> list[tuple[float, _Cut]]:
        """Return the largest load / GPUs and the cut, of some for the segments from ``first`` on."""
        found: list[tuple[float, _Cut]] = []
        if gpus == 1 or not one_each:
            found.append((self._load(first, self._segments) / gpus, ((first, gpus),)))
        for end in range(first + 1, self._segments):
            load = self._load(first, end)
            for own in range(1, min(gpus, 2 if one_each else gpus)):
                for later, cut in self._search(end, gpus - own, one_each):
                    found.append((max(load / own, later), ((first, own), *cut)))
        return nsmallest(_SIMULATED, found)

    def _load(self, first: int, end: int) -> float:
        links = sum(self._times.link_ms[cut - 1] for cut in (first, end) if 0 < cut < self._segments)
        return (self._times.stage_ms(first, end) + links) * self._micro_batches[first]


def _simulated(
    times: SegmentTimes, open_shares: Sequence[float], batch: int, cut: _Cut, replicas: int, hosts: HostTimes
) -> Layout:
    starts = [first for first, _ in cut]
    ends = [*starts[1:], len(open_shares)]
    stage_ms = [times.stage_ms(first, end) for first, end in zip(starts, ends, strict=True)]
    gathering = [times.gathering_ms[end - 1] for end in ends[:-1]]
    merges = merges_of(
        [ms / gpus for ms, (_, gpus) in zip(stage_ms, cut, strict=True)],
        [open_shares[first] for first in starts],
        [None if ms is None else ms / gpus for ms, (_, gpus) in zip(gathering, cut, strict=False)],
    )
    stages = []
    for index, ((first, gpus), end) in enumerate(zip(cut, ends, strict=True)):
        if end == len(open_shares):
            stages.append(StageTimes(stage_ms[index], gpus=gpus))
            break
        leave = 1.0 - open_shares[end] / open_shares[first] if open_shares[first] else 0.0
        ms = stage_ms[index] + ((gathering[index] or 0.0) if merges[index] else 0.0)
        stages.append(StageTimes(ms, times.link_ms[end - 1], leave, merges[index], gpus))
    hosts = hosts if len(stages) > 1 else INSTANT  # one stage hands nothing on
    stages = [replace(stage, hand_on_ms=hosts.hand_on_ms) for stage in stages]
    predicted = simulate(stages, times.split_size, batch, replicas, fixed_ms=hosts.request_ms)
    most = bound(stages, times.split_size, batch, replicas)
    return Layout(times.split_size, tuple(starts), tuple(stages), replicas, predicted, most)
