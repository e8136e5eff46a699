"""Places the programs of heads, which recorded SM and time themselves, under the kernels of the same replay."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from ...kernels.residency import Residency
from ..measuring.occupancy import check_turns
from ..measuring.profiled_replays import TRUNK, Replay


class Program(NamedTuple):
    """A program of a head launch, or one of the pieces of work that it did."""

    launch: int
    """Index among the replay's launches of heads; the last is the joining one."""
    sm: int
    start_us: float
    """Since the replay's first kernel began, as the profiler tells the time."""
    end_us: float


class RecordedReplay(NamedTuple):
    """One replay: its kernels by the profiler, and the programs of its heads by their own recording."""

    replay: Replay
    programs: list[Program]
    """Programs of all launches of heads, by launch and then by start."""
    clocks_differ_us: float
    """Uncertainty of the programs' times: by how much launches disagree on the offset of the device's clock, which
    the programs read, to the profiler's."""


def recorded_replay(replay: Replay, launches: Sequence[Residency], sm_count: int) -> RecordedReplay:
    """Convert the times that programs recorded into the profiler's time.

    The two clocks have no common zero. They are aligned so that the middle of a launch, from its first
    program's start to its last one's end, is the middle of its kernel; of several launches by their median.

    Args:
        replay: of an overlapped network.
        launches: what its launches recorded, in order, with turns on the CPU.
        sm_count: SMs of the device.

    Raises:
        ValueError: not the launches of this replay, or one that did not record.
    """
    kernels = [kernel for kernel in replay if kernel.role != TRUNK]
    if len(kernels) != len(launches) or not kernels:
        raise ValueError(f"launches: got {len(launches)} that recorded, wants the {len(kernels)} of the replay")
    for launch in launches:
        check_turns(launch, sm_count)
    origin = min(int(launch.turns[:, 1].min()) for launch in launches)  # float64 does not hold nanoseconds since 1970
    turns = [
        sorted((start - origin, end - origin, sm) for sm, start, end in launch.turns.tolist()) for launch in launches
    ]
    shifts = [
        (kernel.start_us + kernel.end_us) / 2 - (of[0][0] + max(end for _, end, _ in of)) / 2e3
        for kernel, of in zip(kernels, turns, strict=True)
    ]
    shift = statistics.median(shifts)
    programs = [
        Program(number, sm, round(start / 1e3 + shift, 3), round(end / 1e3 + shift, 3))
        for number, of in enumerate(turns)
        for start, end, sm in of
    ]
    return RecordedReplay(replay, programs, round(max(shifts) - min(shifts), 3))
