"""Footprints of heads: launches unlike those by rule, timed beside the trunk, and how much of the SMs they take."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import config_by_rule
from ...kernels.launch.residency import Residency, recording
from ...model.trunk.fused_convolution import fastest_convolutions
from ..measuring.cells import NEVER
from ..measuring.compile_ahead import NEVER_ENDS, first_launches
from ..measuring.failures import Failure
from ..measuring.heads_in_situ import SideLaunches
from ..measuring.profiled_requests import WARM_UP, record_trace
from ..measuring.progress import Begins
from ..measuring.subject import Subject
from ..records.comparison import typical
from ..records.summaries import Timings
from ..sweep.exclusion import excluded
from ..sweep.space import neighbours
from .measure import BARE, BOTH, HEADS, NetworkParts, time_parts
from .occupancy import (
    MeasuredResidency,
    ProfilerEstimate,
    TheoreticalOccupancy,
    max_warps,
    measured_residency,
    profiler_estimates,
    theoretical_occupancy,
)

#: Name of the footprint that all others are compared with.
BY_RULE = "by rule"
#: SMs that a launch may spread over, at most.
SMS = (4, 16, 64)
#: Warps of a program.
WARPS = (2, 16)
#: Registers of a thread, at most.
REGISTERS = (32, 64)
#: Steps towards fewer programs and more: each about halves or doubles them.
STEPS = (-2, -1, 1, 2, 3)


#: Fields that a step towards other numbers of programs leaves as they are.
_KEPT = ("block_n", "block_f", "num_warps", "waits", "max_registers", "max_programs", "weight_buffers")


class Footprint(NamedTuple):
    """Launches of all heads of a network beside its trunk."""

    name: str
    configs: tuple[tuple[HeadShape, LaunchConfig], ...]
    """For each shape of head."""
    point: SideLaunches


def footprints_to_measure(shapes: Sequence[HeadShape], by_rule: SideLaunches) -> list[Footprint]:
    """Return the footprints to measure for heads of these shapes, the one by rule first.

    Fewer and more programs, fewer and more warps of each, caps of registers and of SMs, the trunk's priority, and the
    largest footprint with priority and without. A change that some head cannot take leaves that head by rule; one that
    none can take is left out.
    """
    found = [_stepped(0, shapes, by_rule)._replace(name=BY_RULE)]
    same = by_rule._replace(trunk_first=False)
    most = _stepped(STEPS[-1], shapes, by_rule)
    changed = [
        *(_stepped(step, shapes, by_rule) for step in STEPS),
        *(_changed(f"{warps} warps a program", shapes, by_rule, num_warps=warps) for warps in WARPS),
        *(_changed(f"{cap} registers", shapes, by_rule, max_registers=cap) for cap in REGISTERS),
        *(_changed(f"{sms} SMs", shapes, by_rule, max_programs=sms) for sms in SMS),
        found[0]._replace(name="same priority", point=same),
        most._replace(name=f"{most.name}, same priority", point=same),
    ]
    for one in changed:
        if all((one.configs, one.point) != (other.configs, other.point) for other in found):
            found.append(one)
    return found


def _stepped(steps: int, shapes: Sequence[HeadShape], point: SideLaunches) -> Footprint:
    name = f"programs x{2**steps}" if steps > 0 else f"programs /{2**-steps}"
    return Footprint(name, tuple((shape, stepped(shape, steps)) for shape in dict.fromkeys(shapes)), point)


def _changed(name: str, shapes: Sequence[HeadShape], point: SideLaunches, **fields: int) -> Footprint:
    def config(shape: HeadShape) -> LaunchConfig:
        rule = config_by_rule(shape)
        one = replace(rule, **fields)  # type: ignore[arg-type]
        # a cap of the programs is that of all heads of a launch together, few as those of one may be
        return one if "max_programs" in fields or excluded(one, shape) is None else rule

    return Footprint(name, tuple((shape, config(shape)) for shape in dict.fromkeys(shapes)), point)


def stepped(shape: HeadShape, steps: int) -> LaunchConfig:
    """Return a configuration with more programs than the rule's, or with fewer if ``steps`` is negative.

    It multiplies in the same way with as many warps; each step goes to the neighbour with most or fewest programs.
    """
    config = config_by_rule(shape)
    for _ in range(abs(steps)):
        others = [
            one
            for one in neighbours(config, shape)
            if all(getattr(one, name) == getattr(config, name) for name in _KEPT)
        ]
        counts = [one.programs(shape.view, shape.classes).total for one in (config, *others)]
        wanted = max(counts) if steps > 0 else min(counts)
        config = (config, *others)[counts.index(wanted)]
    return config


#: Fresh captures of everything, and timed rounds of each.
CAPTURES, ROUNDS = 3, 15
#: Replays whose residency is summed up: each is the last of some back to back, as those that are timed are.
REPLAYS = 7
_BACK_TO_BACK = 3
#: Part: the network while its programs record where they run; the others are those of ``measure``.
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
        parts = NetworkParts(subject, opened)
        if not parts.forks:
            raise ValueError(
                "forks: got none by rule, wants launches beside the trunk: its batch or depth is too small"
            )
        shapes = {tap: head.shape for tap, head in zip(subject.network.taps, parts.heads, strict=True)}
        footprints = footprints_to_measure(list(shapes.values()), parts.by_rule)
        begins(f"compiling {len(footprints)} footprints", 0.15)
        failed = first_launches(footprints, lambda footprint: _launch(parts, footprint), example.device)
        for footprint, failure in failed.items():
            if failure.kind == NEVER_ENDS:
                raise RuntimeError(f"{footprint.name}: {failure}")
        calls: dict[TimedPart, list[Callable[[], object]]] = {
            TimedPart(BARE): [parts.capture(BARE) for _ in range(CAPTURES)]
        }
        for index, footprint in enumerate(footprints):
            begins(f"captures of {footprint.name}", 0.3 + 0.3 * index / len(footprints))
            if footprint not in failed:
                try:
                    calls |= _captures(parts, footprint, recorded=index == 0)
                except (RuntimeError, ValueError) as error:
                    failed[footprint] = Failure.of(error)
        if footprints[0] in failed:
            raise RuntimeError(f"{footprints[0].name}: {failed[footprints[0]]}")
        begins("timing", 0.65)
        chains = {part for part in calls if part.part == HEADS}
        repeat, times = time_parts(calls, TimedPart(BARE), chains, example.device, ROUNDS)
        begins("residency and occupancy", 0.85)
        left = [footprint for footprint in footprints if footprint not in failed]
        replays = [calls[TimedPart(BOTH, footprint)][0] for footprint in left]
        occupied = _occupied(parts, left, replays, typical(times[TimedPart(BARE)]))
        return FootprintsMeasured(shapes, footprints, times, occupied, failed, repeat, parts.protocol)


def _launch(parts: NetworkParts, footprint: Footprint) -> None:
    """Launch once with recording and once without, which compiles."""
    taps = parts.subject.network.taps
    parts.launch(dict(footprint.configs), footprint.point, taps)
    with recording():
        parts.launch(dict(footprint.configs), footprint.point, taps)


def _captures(
    parts: NetworkParts, footprint: Footprint, *, recorded: bool
) -> dict[TimedPart, list[Callable[[], object]]]:
    calls = {TimedPart(BOTH, footprint): [_replay(parts, footprint) for _ in range(CAPTURES)]}
    with parts.launching(dict(footprint.configs)):
        calls[TimedPart(HEADS, footprint)] = [parts.capture(HEADS) for _ in range(CAPTURES)]
    if recorded:
        with recording():
            calls[TimedPart(RECORDED, footprint)] = [_replay(parts, footprint) for _ in range(CAPTURES)]
    return calls


def _replay(parts: NetworkParts, footprint: Footprint) -> Callable[[], object]:
    """Capture the network with heads launched like this."""
    return parts.checked(footprint.name, parts.runner(dict(footprint.configs), footprint.point))


def _occupied(
    parts: NetworkParts, footprints: Sequence[Footprint], replays: Sequence[Callable[[], object]], trunk_us: float
) -> dict[Footprint, FootprintOccupancy]:
    """Measure residency over the trunk's time, and look up the other tiers by one timed replay of each footprint."""
    example = parts.subject.example
    recording_ones, launches = [], []
    for footprint in footprints:
        with recording() as recorded:
            recording_ones.append(_replay(parts, footprint))
        launches.append(recorded[:-1])  # the last one waits for the trunk
    residency = [
        _residency(call, example.device, of, trunk_us) for call, of in zip(recording_ones, launches, strict=True)
    ]
    estimate = _estimated(replays, example)
    return {
        footprint: FootprintOccupancy(
            _theoretical(parts, footprint), estimates[:-1], found, sum(launch.programs for launch in of)
        )
        for footprint, of, estimates, found in zip(footprints, launches, estimate, residency, strict=True)
    }


def _residency(
    replay: Callable[[], object], device: torch.device, launches: Sequence[Residency], trunk_us: float
) -> list[MeasuredResidency]:
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for _ in range(REPLAYS):
        for launch in launches:
            launch.turns.fill_(-1)
        for _ in range(_BACK_TO_BACK):
            replay()
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


def _theoretical(parts: NetworkParts, footprint: Footprint) -> list[TheoreticalOccupancy]:
    """Return the bounds of the kernels that are timed, which do not record."""
    device, taps = parts.subject.example.device, parts.subject.network.taps
    beside = taps[: taps.index(footprint.point.forks[-1]) + 1]
    with torch.cuda.device(device), torch.no_grad():
        launched = parts.launch(dict(footprint.configs), footprint.point, beside)
    return [theoretical_occupancy(one.compiled, device) for one in launched]
