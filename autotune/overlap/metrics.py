"""Metrics of overlap in replays: coverage, exposed time, join stall, stretch of kernels, hiding efficiency."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..records.intervals import Interval, common, length, merged
from ..records.summaries import Percentiles, Timings, percentiles
from .replays import JOIN, SIDE, TRUNK, Replay


class Overlap(NamedTuple):
    """Times of one replay in microseconds, by kernels as the profiler saw them."""

    trunk_us: float
    """Time during which at least one kernel of the trunk ran."""
    side_us: float
    """Time during which at least one launch of heads ran, without the joining one, which waits for the trunk."""
    exposed_us: float
    """The part of ``side_us`` that no kernel of the trunk covers."""
    join_stall_us: float
    """Time from the end of the trunk's last kernel to the end of the replay."""
    join_us: float
    """The part of ``join_stall_us`` that the joining launch itself takes, with late heads and classifier."""
    span_us: float
    """Time from the begin of the first kernel to the end of the last."""

    @property
    def coverage(self) -> float | None:
        """The share of the heads' time that lies under kernels of the trunk; None: nothing runs beside it."""
        return (self.side_us - self.exposed_us) / self.side_us if self.side_us else None


class KernelStretch(NamedTuple):
    """One kernel of the trunk with and without heads: medians over replays, microseconds."""

    name: str
    bare_us: float
    both_us: float


def overlap_of(replay: Replay) -> Overlap:
    """Measure one replay.

    Raises:
        ValueError: it has no kernel of a trunk.
    """
    trunk, side, join = (_union(replay, role) for role in (TRUNK, SIDE, JOIN))
    if not trunk:
        raise ValueError("replay: got no kernels but the heads', wants those of a trunk")
    end = max(kernel.end_us for kernel in replay)
    return Overlap(
        trunk_us=length(trunk),
        side_us=length(side),
        exposed_us=length(side) - length(common(side, trunk)),
        join_stall_us=end - trunk[-1][1],
        join_us=length(join),
        span_us=end - min(kernel.start_us for kernel in replay),
    )


def _union(replay: Replay, role: str) -> list[Interval]:
    return merged((kernel.start_us, kernel.end_us) for kernel in replay if kernel.role == role)


def spreads(overlaps: Sequence[Overlap]) -> dict[str, Percentiles | None]:
    """Return the spread over replays of each field, and of "coverage": None if nothing runs beside the trunk."""
    found: dict[str, Percentiles | None] = {
        name: percentiles([getattr(one, name) for one in overlaps]) for name in Overlap._fields
    }
    coverage = [one.coverage for one in overlaps if one.coverage is not None]
    return {**found, "coverage": percentiles(coverage) if coverage else None}


def median_replay(replays: Sequence[Replay]) -> int:
    """Return the index of the replay whose time from first to last kernel is the median, or the next longer."""
    ordered = sorted(range(len(replays)), key=lambda index: overlap_of(replays[index]).span_us)
    return ordered[len(ordered) // 2]


def kernel_stretches(bare: Sequence[Replay], both: Sequence[Replay]) -> list[KernelStretch]:
    """Compare the trunk's kernels with and without heads, one by one in the order in which they run.

    The bare trunk may have more kernels at its end: with heads, its classifier runs in the joining launch.

    Raises:
        ValueError: replays are not of the same kernels.
    """
    alone, beside = _of_trunk("bare", bare), _of_trunk("both", both)
    names = [kernel[0] for kernel in beside[0]]
    if [kernel[0] for kernel in alone[0][: len(names)]] != names:
        raise ValueError("the trunk runs other kernels without heads than with them: they have no stretch one by one")
    return [
        KernelStretch(
            name,
            statistics.median(replay[index][1] for replay in alone),
            statistics.median(replay[index][1] for replay in beside),
        )
        for index, name in enumerate(names)
    ]


def _of_trunk(which: str, replays: Iterable[Replay]) -> list[list[tuple[str, float]]]:
    """Return names and times of the trunk's kernels in each replay."""
    found = [[(kernel.name, kernel.duration_us) for kernel in replay if kernel.role == TRUNK] for replay in replays]
    if len({tuple(name for name, _ in kernels) for kernels in found}) != 1:
        raise ValueError(f"{which}: got {len(found)} replays of different kernels, wants some of the same")
    return found


def hiding_efficiency(trunk: Timings, heads: Timings, both: Timings) -> Percentiles:
    """Return the share of the shorter one's time that is hidden: (T_trunk + T_heads - T_both) / min(T_trunk, T_heads).

    1 is all of it; 0 none, as if one ran after the other; below 0 they take longer together than one after the other.

    Args:
        trunk: microseconds of the trunk alone, [captures][rounds].
        heads: of all heads alone, one launch after another.
        both: of the network with its heads.

    Returns:
        Median and percentiles over all combinations of captures, by their medians: captures of one thing differ.
    """
    medians = [[statistics.median(rounds) for rounds in times] for times in (trunk, heads, both)]
    return percentiles([(a + b - c) / min(a, b) for a, b, c in itertools.product(*medians)])
