"""``Placement``: the segments of each stage, and where open samples are merged, by times measured on one rank.

    load of a stage = the sum, over its segments, of time x share of the samples that have not left before

Stages are made so that the largest load is as small as can be. Open samples are merged behind a stage where that makes
the slowest stage faster, the gathering counted in: a pipeline is as fast as its slowest stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from ..balance import balanced, median_ms
from ..segments import Segment, run_segments
from .answered import first_state
from .cut import Cut, to_wire, wires_like
from .stage import LAG, Stage
from .survivors import NOBODY, Merging, no_places

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
        """Behind each stage but the last, how many steps later than its last micro-batch it hands on what is left."""
        return [(Merging.extra_steps + LAG * (stage > 0)) * merges for stage, merges in enumerate(self.merges)]


def place(
    cut: Cut, x: Tensor, open_shares: Sequence[float], stages: int, starts: Sequence[int] | None = None
) -> Placement:
    """Measure segments and gathering with a micro-batch, and place the segments.

    Args:
        cut: of a network.
        x: a micro-batch, on the segments' device.
        open_shares: of each segment, the share of the samples that have not left before it.
        stages: how many there are.
        starts: of the stages, where that is given.
    """
    with torch.no_grad():
        ms = segment_ms(cut, x)
    merging = merging_ms(cut.segments, x)
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
    inner = [end - 1 for end in ends[:-1]]  # the segments behind which samples may be merged
    takes = [gathering[segment] if movable[segment] else None for segment in inner]
    merges = merges_of(of_stage, [open_shares[start] for start in starts], takes)
    notes = [f"{each:.3g} ms a micro-batch of {size}" for each in of_stage]
    for stage, does in enumerate(merges):
        start, end = starts[stage], ends[stage]
        leave = 1.0 - open_shares[end] / open_shares[start] if open_shares[start] else 0.0
        notes[stage] += f", {leave:.0%} of its samples leave; "
        if takes[stage] is None:
            notes[stage] += "all are passed on as they lie: what is handed over has no row a sample"
        elif does:
            notes[stage] += f"others are merged, which takes {takes[stage]:.2g} ms"
        else:
            notes[stage] += "all are passed on as they lie: merging would make no stage faster that is the slowest"
    return Placement([*starts], merges, notes)


def merges_of(ms: Sequence[float], open_shares: Sequence[float], gathering: Sequence[float | None]) -> list[bool]:
    """Return behind which stages to merge, so that the slowest one is as fast as can be.

    Args:
        ms: of each stage, for a full micro-batch.
        open_shares: of each stage, the share of the samples that have not left before it.
        gathering: behind each stage but the last what merging takes, in milliseconds; None where it cannot be.
    """

    @cache
    def best(stage: int, since: int) -> tuple[float, tuple[bool, ...]]:
        """The slowest of the stages from this one on, which get what was merged before the stage ``since``."""
        own = ms[stage] * open_shares[since]
        if stage == len(ms) - 1:
            return own, ()
        later, does = best(stage + 1, since)
        found = [(max(own, later), (False, *does))]
        takes = gathering[stage]
        if takes is not None:
            later, does = best(stage + 1, stage + 1)
            found.append((max(own + takes, later), (True, *does)))
        return min(found)

    return [*best(0, 0)[1]]


def segment_ms(cut: Cut, x: Tensor) -> list[float]:
    """Measure what each segment with its head takes for a micro-batch, in milliseconds.

    Each is a stage by itself, and so a graph where stages are graphs.
    """
    handed: Sequence[Tensor] = [x]
    found = []
    for index, (segment, (_, hands)) in enumerate(zip(cut.segments, run_segments(cut.segments, x), strict=True)):
        stage = Stage(cut, index, index + 1, len(x), x.device, merges=False, name="")
        stage.capture(x)
        try:
            found.append(median_ms(partial(stage.compute_alone, handed)))
        finally:
            stage.close()
        handed = [to_wire(each, like) for each, like in zip(hands, segment.hands, strict=True)]
    return found


def merging_ms(segments: Sequence[Segment], x: Tensor) -> list[float | None]:
    """Measure what merging takes behind each segment, for a micro-batch; None where rows are no samples."""
    with torch.no_grad():
        return [
            _gathering_ms(segment, x) if moves else None
            for segment, moves in zip(segments, _movable(segments, x), strict=True)
        ]


def _gathering_ms(segment: Segment, x: Tensor) -> float:
    """Measure what merging takes behind a segment, where half of the samples are open."""
    handed = [first_state(len(x)).to(x.device), *wires_like(segment.hands, x.device)]
    merging, places = Merging(len(x), handed), no_places(len(x))
    places[::2] = NOBODY + 1

    def gather() -> None:
        merging.hand_on(places, handed, last=False)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()

    return median_ms(gather)


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
