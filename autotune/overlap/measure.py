"""Measures overlap on a GPU: times of trunk, heads and both without a profiler, then replays under it."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import profile as torch_profile

from ...kernels.launch.residency import Residency, recording
from ...model.trunk.fused_convolution import fastest_convolutions
from ..heads.alone import CHAIN
from ..heads.measure import BLOCK_US
from ..measuring.cells import NEVER
from ..measuring.occupancy import check_turns
from ..measuring.profiled_replays import TRUNK, Replay, read_replays
from ..measuring.profiled_requests import activities, record_trace
from ..measuring.progress import Begins
from ..measuring.subject import Subject
from ..measuring.timers import CAPTURES, FINAL_ROUNDS, time_rounds
from ..records.summaries import Timings
from .captured_parts import BARE, BOTH, HEADS, CapturedParts


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


#: Profiled replays of the bare trunk and of the whole network.
REPLAYS = 20


@dataclass(frozen=True)
class OverlapMeasured:
    """Times and replays of one network."""

    times: dict[str, Timings]
    """Times by part, without a profiler and back to back: microseconds, [captures][rounds]."""
    profiled: dict[str, list[float]]
    """Times of the first captures of ``BARE`` and ``BOTH`` under the profiler: microseconds, [rounds]."""
    replays: dict[str, list[Replay]]
    """``REPLAYS`` replays of these captures in the profiler's trace, each from an idle device."""
    recorded: list[RecordedReplay]
    """``REPLAYS`` of a capture of ``BOTH`` whose heads record where their programs run."""
    forks: tuple[str, ...]
    """Taps after which launches of heads leave the trunk."""
    repeat: int
    """Calls back to back between two events."""
    notes: tuple[str, ...]
    """Changes made to the backbone, in sentences."""


def measure_overlap(subject: Subject, begins: Begins) -> OverlapMeasured:
    """Capture the parts of a network ``CAPTURES`` times each, check their answers, time and profile them.

    Everything is timed before anything is profiled: the profiler's hooks into CUDA outlive it.

    Raises:
        WrongAnswer: a capture answers wrongly; nothing is timed then.
        RuntimeError: whatever fails in a capture or a call, or the profiler loses replays.
    """
    example = subject.example
    with ExitStack() as opened, fastest_convolutions(len(example)), subject.exits(NEVER):
        begins("trunk", 0.1)
        parts = CapturedParts(subject, opened)
        calls: dict[str, list[Callable[[], object]]] = {}
        for index, (name, capture) in enumerate(parts.capture.items()):
            begins(f"captures of {name}", 0.2 + 0.2 * index)
            calls[name] = [capture() for _ in range(CAPTURES)]
        begins("timing", 0.8)
        first = time_rounds({BARE: calls[BARE][:1]}, example.device, rounds=2, repeat=2)
        repeat = max(2, round(BLOCK_US / min(first[BARE][0])))
        times: dict[str, Timings] = {**time_rounds(calls, example.device, rounds=FINAL_ROUNDS, repeat=repeat)}
        times[HEADS] = [[us / CHAIN for us in rounds] for rounds in times[HEADS]]
        begins("profiling", 0.9)
        traced = {name: calls[name][0] for name in (BARE, BOTH)}
        with recording() as launches:
            recorded = parts.capture[BOTH]()
        with torch_profile(activities=activities(example)):
            under = {name: [call] for name, call in traced.items()}
            profiled = time_rounds(under, example.device, rounds=FINAL_ROUNDS, repeat=repeat)
        return OverlapMeasured(
            times=times,
            profiled={name: rounds for name, (rounds,) in profiled.items()},
            replays={name: _profiled_replays(name, call, example) for name, call in traced.items()},
            recorded=_recorded_replays(recorded, launches, example),
            forks=parts.forks,
            repeat=repeat,
            notes=parts.trunk_notes,
        )


def _profiled_replays(name: str, call: Callable[[], object], example: Tensor) -> list[Replay]:
    with tempfile.TemporaryDirectory() as folder:
        trace = record_trace(lambda _x: call(), example, REPLAYS, Path(folder) / "trace.json")
    replays = read_replays(trace)
    if len(replays) != REPLAYS:
        raise RuntimeError(f"{name}: the profiler's trace holds {len(replays)} of {REPLAYS} replays")
    return replays


def _recorded_replays(
    call: Callable[[], object], launches: Sequence[Residency], example: Tensor
) -> list[RecordedReplay]:
    recordings: list[list[Residency]] = []

    def keep() -> None:
        call()
        # copied, for each replay writes them anew
        recordings.append([launch._replace(turns=launch.turns.to("cpu", copy=True)) for launch in launches])

    replays = _profiled_replays("recorded", keep, example)
    sm_count = torch.cuda.get_device_properties(example.device).multi_processor_count
    return [recorded_replay(replay, of, sm_count) for replay, of in zip(replays, recordings[-REPLAYS:], strict=True)]
