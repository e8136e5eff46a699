"""``Placement``: the segments of each stage, and where open samples are merged, by times measured on one rank.

    load of a stage = the sum, over its segments, of time x share of the samples that have not left before

Stages are made so that the largest load is as small as can be. Open samples are merged behind a stage if that saves the
slowest later stage more time a micro-batch than the gathering takes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...kernels import decide
from ..module_head import AuxHead
from .segments import Segment, run_segments, wires_like
from .survivors import Merging, Passing, empty_rows

_WARM_UPS, _RUNS = 2, 5
#: By how much what is handed over may differ, the mean difference over the mean, for the samples of a micro-batch that
#: lie in it in another order. Samples taken for others differ by tens of percents.
_ALIKE = 5e-2


@dataclass(frozen=True)
class Placement:
    """Segments on stages. It goes from the rank that measured to all others as JSON."""

    starts: list[int]
    """The first segment of each stage."""
    merges: list[bool]
    """Behind each stage but the last, whether open samples are merged."""
    notes: list[str]
    """Of each stage, its times and why it merges or not, for people."""

    @property
    def extra_steps(self) -> list[int]:
        """Behind each stage but the last, how many more micro-batches may come out of it than go in."""
        return [(Merging if merges else Passing).extra_steps for merges in self.merges]


def balanced(loads: Sequence[float], stages: int) -> list[int]:
    """Return the first segment of each stage, so that the largest sum of loads of a stage is as small as can be."""

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return sum(loads[first:]), (first,)
        found = []
        for end in range(first + 1, len(loads) - stages + 2):
            later, starts = best(end, stages - 1)
            found.append((max(sum(loads[first:end]), later), (first, *starts)))
        return min(found)

    return [*best(0, stages)[1]]


def place(
    segments: Sequence[Segment],
    heads: Sequence[AuxHead],
    x: Tensor,
    open_shares: Sequence[float],
    stages: int,
    starts: Sequence[int] | None,
) -> Placement:
    """Measure segments and gathering with a micro-batch, and place the segments.

    Args:
        segments: of a network's backbone.
        heads: behind each but the last.
        x: a micro-batch, on the segments' device.
        open_shares: of each segment, the share of the samples that have not left before it.
        stages: how many there are.
        starts: of the stages, where that is given.
    """
    with torch.no_grad():
        ms = [_median_ms(run, x) for run in _runs(segments, heads, x)]
    merging = merging_ms(segments, x)
    movable, gathering = [each is not None for each in merging], [each or 0.0 for each in merging]
    if starts is not None:
        return _described(starts, ms, gathering, movable, open_shares, len(x))
    loads = [each * share for each, share in zip(ms, open_shares, strict=True)]
    placed = _described(balanced(loads, stages), ms, gathering, movable, open_shares, len(x))
    if any(placed.merges):
        return placed
    return _described(balanced(ms, stages), ms, gathering, movable, open_shares, len(x))


def _described(
    starts: Sequence[int],
    ms: Sequence[float],
    gathering: Sequence[float],
    movable: Sequence[bool],
    open_shares: Sequence[float],
    size: int,
) -> Placement:
    """Decide for stages with these first segments where samples are merged, and say why."""
    ends = [*starts[1:], len(ms)]
    of_stage = [sum(ms[start:end]) for start, end in zip(starts, ends, strict=True)]
    merges, notes = [], []
    for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
        notes.append(f"{of_stage[stage]:.3g} ms a micro-batch of {size}")
        if end == len(ms):
            break
        leave = 1.0 - open_shares[end] / open_shares[start] if open_shares[start] else 0.0
        saved = leave * max(of_stage[stage + 1 :])
        merges.append(movable[end - 1] and saved > gathering[end - 1])
        notes[-1] += f", {leave:.0%} of its samples leave; "
        if not movable[end - 1]:
            notes[-1] += "others are passed on as they lie: what is handed over has no row a sample"
        else:
            does = "merged" if merges[-1] else "passed on as they lie"
            notes[-1] += f"others are {does}: merging takes {gathering[end - 1]:.2g} ms and saves {saved:.2g}"
    return Placement([*starts], merges, notes)


def _runs(segments: Sequence[Segment], heads: Sequence[AuxHead], x: Tensor) -> list[Callable[[], object]]:
    """Return what runs each segment with its head, by itself."""
    taken = [(x,), *(handed for _, handed in run_segments(segments, x)[:-1])]
    exits: list[Callable[[Tensor], object]] = [*heads, lambda logits: decide(logits, 1.0, 1.0)]

    def run_of(index: int) -> Callable[[], object]:
        return lambda: exits[index](segments[index].module(*taken[index])[0])

    return [run_of(index) for index in range(len(segments))]


def _median_ms(run: Callable[[], object], x: Tensor) -> float:
    times = []
    for _ in range(_WARM_UPS + _RUNS):
        began = time.perf_counter()
        run()
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[_WARM_UPS:])


def merging_ms(segments: Sequence[Segment], x: Tensor) -> list[float | None]:
    """Measure what merging takes behind each segment, for a micro-batch; None where rows are no samples."""
    with torch.no_grad():
        return [
            _gathering_ms(segment, x) if moves else None
            for segment, moves in zip(segments, _movable(segments, x), strict=True)
        ]


def _gathering_ms(segment: Segment, x: Tensor) -> float:
    """Measure what merging takes behind a segment, where half of the samples are open."""
    wires = wires_like(segment.hands, x.device)
    merging, rows = Merging(len(x), wires), empty_rows(len(x))
    rows[::2, 0] = 0
    return _median_ms(lambda: merging.hand_on(rows, wires, last=False), x)


def _movable(segments: Sequence[Segment], x: Tensor) -> list[bool]:
    """Return whether what each segment hands over has a row for each sample, which may lie in any other place."""
    size = len(x)
    if size == 1:
        return [False] * len(segments)
    pairs = zip(run_segments(segments, x), run_segments(segments, x.roll(1, 0)), strict=True)
    return [
        all(len(one) == size and _alike(one.roll(1, 0), other) for one, other in zip(handed, of_other, strict=True))
        for (_, handed), (_, of_other) in pairs
    ]


def _alike(one: Tensor, other: Tensor) -> bool:
    difference = (one.double() - other.double()).abs().mean()
    return bool(difference <= _ALIKE * one.double().abs().mean())
