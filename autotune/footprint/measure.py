"""Measures footprints of heads on a GPU: interleaved times beside the trunk, then occupancy of the SMs."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.residency import Residency, recording
from ...model.runners.overlapped import OverlappedRunner
from ...model.trunk.fused_convolution import fastest_convolutions
from ..heads.alone import CHAIN
from ..heads.compile_ahead import NEVER_ENDS, first_launches
from ..heads.in_situ import SideLaunches
from ..heads.measure import BLOCK_US
from ..measuring.cells import NEVER
from ..measuring.failures import Failure
from ..measuring.occupancy import (
    MeasuredResidency,
    ProfilerEstimate,
    TheoreticalOccupancy,
    max_warps,
    measured_residency,
    profiler_estimates,
    theoretical_occupancy,
)
from ..measuring.profiled_requests import WARM_UP, record_trace
from ..measuring.progress import Begins
from ..measuring.subject import Subject
from ..measuring.timers import time_rounds
from ..overlap.captured_parts import BARE, BOTH, HEADS, CapturedParts, check
from ..records.comparison import typical
from ..records.summaries import Timings
from .launch_variations import Footprint, footprints_to_measure

#: Fresh captures of everything, and timed rounds of each.
CAPTURES, ROUNDS = 3, 15
#: Replays whose residency is summed up: each is the last of some back to back, as those that are timed are.
REPLAYS = 7
_BACK_TO_BACK = 3
#: Part: the network while its programs record where they run; the others are those of ``overlap.captured_parts``.
RECORDED = "recorded"


class TimedPart(NamedTuple):
    """A part of the network that is timed, with the footprint of its heads if it has any."""

    part: str
    footprint: Footprint | None = None


class FootprintOccupancy(NamedTuple):
    """Occupancy by the launches of one footprint beside the trunk; see ``occupancy.TIERS``."""

    theoretical: list[TheoreticalOccupancy]
    """One for each launch, as it is timed."""
    estimate: list[ProfilerEstimate]
    """One for each launch, as it is timed."""
    residency: list[MeasuredResidency]
    """One for each of ``REPLAYS``, of all these launches together, over the time of the bare trunk."""
    programs: int
    """Programs of all these launches together."""


@dataclass(frozen=True)
class FootprintsMeasured:
    """Times and occupancy of one network with every footprint."""

    shapes: Mapping[str, HeadShape]
    """Shapes of the heads, by tap."""
    footprints: list[Footprint]
    """Measured or failed, the one by rule first."""
    times: dict[TimedPart, Timings]
    """Microseconds, [captures][rounds]."""
    occupied: dict[Footprint, FootprintOccupancy]
    failed: dict[Footprint, Failure] = field(default_factory=dict)
    repeat: int = 1
    """Calls back to back between two events."""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the network for records; see ``HeadsInSitu``."""


def measure_footprints(subject: Subject, begins: Begins) -> FootprintsMeasured:
    """Capture a network with every footprint, check answers, time all in the same rounds, then measure occupancy.

    Raises:
        WrongAnswer: the bare trunk answers wrongly, or the network by rule.
        ValueError: no launch leaves the trunk by rule.
        RuntimeError: a capture or call by rule fails, or anything after the captures.
    """
    example = subject.example
    with ExitStack() as opened, fastest_convolutions(len(example)), subject.exits(NEVER):
        begins("trunk", 0.1)
        parts = CapturedParts(subject, opened)
        if not parts.forks:
            raise ValueError(
                "forks: got none by rule, wants launches beside the trunk: its batch or depth is too small"
            )
        shapes = {tap: head.shape for tap, head in zip(subject.network.taps, parts.heads, strict=True)}
        footprints = footprints_to_measure(list(shapes.values()), SideLaunches(parts.forks))
        begins(f"compiling {len(footprints)} footprints", 0.15)
        failed = first_launches(footprints, lambda footprint: _launch(parts, footprint), example.device)
        for footprint, failure in failed.items():
            if failure.kind == NEVER_ENDS:
                raise RuntimeError(f"{footprint.name}: {failure}")
        calls: dict[TimedPart, list[Callable[[], object]]] = {
            TimedPart(BARE): [parts.capture[BARE]() for _ in range(CAPTURES)]
        }
        for index, footprint in enumerate(footprints):
            begins(f"captures of {footprint.name}", 0.3 + 0.3 * index / len(footprints))
            if footprint not in failed:
                try:
                    calls |= _captures(parts, footprint, opened, recorded=index == 0)
                except (RuntimeError, ValueError) as error:
                    failed[footprint] = Failure.of(error)
        if footprints[0] in failed:
            raise RuntimeError(f"{footprints[0].name}: {failed[footprints[0]]}")
        begins("timing", 0.65)
        first = time_rounds({BARE: calls[TimedPart(BARE)][:1]}, example.device, rounds=2, repeat=2)
        repeat = max(2, round(BLOCK_US / min(first[BARE][0])))
        found = time_rounds(calls, example.device, rounds=ROUNDS, repeat=repeat)
        times: dict[TimedPart, Timings] = {
            variant: [[us / (CHAIN if variant.part == HEADS else 1) for us in rounds] for rounds in captures]
            for variant, captures in found.items()
        }
        begins("residency and occupancy", 0.85)
        left = [footprint for footprint in footprints if footprint not in failed]
        replays = [calls[TimedPart(BOTH, footprint)][0] for footprint in left]
        occupied = _occupied(parts, left, replays, typical(times[TimedPart(BARE)]), opened)
        protocol = {**parts.protocol, "forks": list(parts.forks)}
        return FootprintsMeasured(shapes, footprints, times, occupied, failed, repeat, protocol)


def _launch(parts: CapturedParts, footprint: Footprint) -> None:
    """Launch once with recording and once without, which compiles."""
    taps = parts.subject.network.taps
    parts.launch(dict(footprint.configs), footprint.point, taps)
    with recording():
        parts.launch(dict(footprint.configs), footprint.point, taps)


def _captures(
    parts: CapturedParts, footprint: Footprint, opened: ExitStack, *, recorded: bool
) -> dict[TimedPart, list[Callable[[], object]]]:
    def replay(runner: OverlappedRunner) -> Callable[[], object]:
        return lambda: runner(parts.subject.example)

    runners = [_runner(parts, footprint, opened) for _ in range(CAPTURES)]
    with parts.launching(dict(footprint.configs)):
        alone = [parts.capture[HEADS]() for _ in range(CAPTURES)]
    calls = {TimedPart(BOTH, footprint): [replay(runner) for runner in runners], TimedPart(HEADS, footprint): alone}
    if recorded:
        with recording():
            recording_ones = [_runner(parts, footprint, opened) for _ in range(CAPTURES)]
        calls[TimedPart(RECORDED, footprint)] = [replay(runner) for runner in recording_ones]
    return calls


def _runner(parts: CapturedParts, footprint: Footprint, opened: ExitStack) -> OverlappedRunner:
    runner = parts.runner(dict(footprint.configs), footprint.point)
    opened.callback(runner.close)
    check(footprint.name, parts.wrong(parts.subject.network.taps, runner))
    return runner


def _occupied(
    parts: CapturedParts,
    footprints: Sequence[Footprint],
    replays: Sequence[Callable[[], object]],
    trunk_us: float,
    opened: ExitStack,
) -> dict[Footprint, FootprintOccupancy]:
    """Measure residency over the trunk's time, and look up the other tiers by one timed replay of each footprint."""
    example = parts.subject.example
    runners, launches = [], []
    for footprint in footprints:
        with recording() as recorded:
            runners.append(_runner(parts, footprint, opened))
        launches.append(recorded[:-1])  # the last one waits for the trunk
    residency = [_residency(runner, example, of, trunk_us) for runner, of in zip(runners, launches, strict=True)]
    estimate = _estimated(replays, example)
    return {
        footprint: FootprintOccupancy(
            _theoretical(parts, footprint), estimates[:-1], found, sum(launch.programs for launch in of)
        )
        for footprint, of, estimates, found in zip(footprints, launches, estimate, residency, strict=True)
    }


def _residency(
    runner: OverlappedRunner, example: torch.Tensor, launches: Sequence[Residency], trunk_us: float
) -> list[MeasuredResidency]:
    device = example.device
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for _ in range(REPLAYS):
        for launch in launches:
            launch.turns.fill_(-1)
        for _ in range(_BACK_TO_BACK):
            runner(example)
        torch.cuda.synchronize(device)
        turned = [launch._replace(turns=launch.turns.cpu()) for launch in launches]
        found.append(measured_residency(turned, sm_count, max_warps(device), trunk_us))
    return found


def _estimated(replays: Sequence[Callable[[], object]], example: torch.Tensor) -> list[list[ProfilerEstimate]]:
    """Return the profiler's estimates; profiles each replay once."""
    order = iter([replays[0]] * WARM_UP + list(replays))
    with tempfile.TemporaryDirectory() as folder:
        trace = record_trace(lambda _x: next(order)(), example, len(replays), Path(folder) / "trace.json")
    found = profiler_estimates(trace)
    if len(found) != len(replays):
        raise RuntimeError(f"the profiler saw {len(found)} of {len(replays)} replays with heads")
    return found


def _theoretical(parts: CapturedParts, footprint: Footprint) -> list[TheoreticalOccupancy]:
    """Return the bounds of the kernels that are timed, which do not record."""
    device, taps = parts.subject.example.device, parts.subject.network.taps
    beside = taps[: taps.index(footprint.point.forks[-1]) + 1]
    with torch.cuda.device(device), torch.no_grad():
        launched = parts.launch(dict(footprint.configs), footprint.point, beside)
    return [theoretical_occupancy(one.compiled, device) for one in launched]
