"""Measures what footprints of heads do to the trunk on a GPU: times, interleaved, and then how full the SMs are."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.head_shape import HeadShape
from ...kernels.residency import Residency, recording
from ...model.runners.overlapped import OverlappedRunner
from ...model.trunk.fused_convolution import fastest_convolutions
from ..heads.alone import CHAIN
from ..heads.first_launches import NEVER_ENDS, first_launches
from ..heads.in_situ import SideLaunches
from ..heads.measure import BLOCK_US
from ..measuring.cells import NEVER
from ..measuring.failures import Failure
from ..measuring.occupancy import Estimate, Resident, Theoretical, estimates, max_warps, resident, theoretical
from ..measuring.request_trace import WARM_UP, record_trace
from ..measuring.subject import Subject
from ..measuring.timers import time_rounds
from ..overlap.parts import BARE, BOTH, HEADS, Parts, WrongAnswer
from ..records.comparison import Timings, typical
from .footprints import Footprint, footprints
from .launches import launch_beside
from .trunk_probe import Room, probe_trunk

#: Fresh captures of everything, and timed rounds of each.
CAPTURES, ROUNDS = 3, 15
#: Replays whose residency is summed up: each is the last of some back to back, as those that are timed are.
REPLAYS = 7
_BACK_TO_BACK = 3
#: The network while its programs record where they run; the other parts are those of ``overlap_parts``.
RECORDED = "recorded"


class Variant(NamedTuple):
    """What is timed."""

    part: str
    footprint: Footprint | None = None


class Occupied(NamedTuple):
    """How full the launches of one footprint beside the trunk make the SMs; see ``occupancy.TIERS``."""

    theoretical: list[Theoretical]
    """Of each launch, as it is timed."""
    estimate: list[Estimate]
    """Of each launch, as it is timed."""
    residency: list[Resident]
    """Of each of ``REPLAYS``, of all these launches together, in the time of the bare trunk."""
    programs: int
    """Of all these launches together."""


@dataclass(frozen=True)
class FootprintsMeasured:
    """What was measured of one network."""

    shapes: Mapping[str, HeadShape]
    """Of the heads, by tap."""
    footprints: list[Footprint]
    """Measured or failed, what is by rule first."""
    times: dict[Variant, Timings]
    """Microseconds, [captures][rounds]."""
    occupied: dict[Footprint, Occupied]
    room: Room
    """What the bare trunk leaves free."""
    failed: dict[Footprint, Failure] = field(default_factory=dict)
    repeat: int = 1
    """Calls back to back between two events."""
    protocol: Mapping[str, Any] = field(default_factory=dict)
    """Of the network; see ``HeadsInSitu``."""


def measure_footprints(subject: Subject, begins: Callable[[str, float], None]) -> FootprintsMeasured:
    """Capture a network with every footprint, check the answers, time all in the same rounds, and then look inside.

    Where no head is launched beside the trunk by rule there is nothing to measure.

    Args:
        subject: on a CUDA device.
        begins: is told what begins, and the share of the whole that is done.

    Raises:
        WrongAnswer: what is by rule answers wrongly, or the bare trunk.
        ValueError: no launch leaves the trunk by rule.
        RuntimeError: whatever fails in a capture or call of what is by rule, or in all that comes after the captures.
    """
    example = subject.example
    with ExitStack() as opened, fastest_convolutions(len(example)), subject.exits(NEVER):
        begins("trunk", 0.1)
        parts = Parts(subject, opened)
        if not parts.forks:
            raise ValueError(
                "forks: got none by rule, wants launches beside the trunk: its batch or depth is too small"
            )
        shapes = {tap: head.shape for tap, head in zip(subject.network.taps, parts.heads, strict=True)}
        points = footprints(list(shapes.values()), SideLaunches(parts.forks))
        begins(f"compiling {len(points)} footprints", 0.15)
        failed = first_launches(points, lambda point: _launch(parts, point), example.device)
        for point, failure in failed.items():
            if failure.kind == NEVER_ENDS:
                raise RuntimeError(f"{point.name}: {failure}")
        calls: dict[Variant, list[Callable[[], object]]] = {
            Variant(BARE): [parts.capture[BARE]() for _ in range(CAPTURES)]
        }
        for place, point in enumerate(points):
            begins(f"captures of {point.name}", 0.3 + 0.3 * place / len(points))
            if point not in failed:
                try:
                    calls |= _captures(parts, point, opened, recorded=place == 0)
                except (RuntimeError, ValueError) as error:
                    failed[point] = Failure.of(error)
        if points[0] in failed:
            raise RuntimeError(f"{points[0].name}: {failed[points[0]]}")
        begins("timing", 0.65)
        first = time_rounds({BARE: calls[Variant(BARE)][:1]}, example.device, rounds=2, repeat=2)
        repeat = max(2, round(BLOCK_US / min(first[BARE][0])))
        found = time_rounds(calls, example.device, rounds=ROUNDS, repeat=repeat)
        times: dict[Variant, Timings] = {
            variant: [[us / (CHAIN if variant.part == HEADS else 1) for us in rounds] for rounds in captures]
            for variant, captures in found.items()
        }
        begins("residency and occupancy", 0.85)
        left = [point for point in points if point not in failed]
        replays = [calls[Variant(BOTH, point)][0] for point in left]
        occupied = _occupied(parts, left, replays, typical(times[Variant(BARE)]), opened)
        room = probe_trunk(parts.bare_graph().replay, typical(times[Variant(BARE)]), example.device)
        protocol = {**parts.protocol, "forks": list(parts.forks)}
        return FootprintsMeasured(shapes, points, times, occupied, room, failed, repeat, protocol)


def _launch(parts: Parts, point: Footprint) -> None:
    """Compile, with and without recording."""
    taps = parts.subject.network.taps
    parts.launch(dict(point.configs), point.point, taps)
    with recording():
        parts.launch(dict(point.configs), point.point, taps)


def _captures(
    parts: Parts, point: Footprint, opened: ExitStack, *, recorded: bool
) -> dict[Variant, list[Callable[[], object]]]:
    def replay(runner: OverlappedRunner) -> Callable[[], object]:
        return lambda: runner(parts.subject.example)

    runners = [_runner(parts, point, opened) for _ in range(CAPTURES)]
    with parts.launching(dict(point.configs)):
        alone = [parts.capture[HEADS]() for _ in range(CAPTURES)]
    calls = {Variant(BOTH, point): [replay(runner) for runner in runners], Variant(HEADS, point): alone}
    if recorded:
        with recording():
            recording_ones = [_runner(parts, point, opened) for _ in range(CAPTURES)]
        calls[Variant(RECORDED, point)] = [replay(runner) for runner in recording_ones]
    return calls


def _runner(parts: Parts, point: Footprint, opened: ExitStack) -> OverlappedRunner:
    runner = parts.runner(dict(point.configs), point.point)
    opened.callback(runner.close)
    wrong = parts.wrong(parts.subject.network.taps, runner)
    if wrong is not None:
        raise WrongAnswer(f"{point.name}: {wrong}; not timed")
    return runner


def _occupied(
    parts: Parts,
    points: Sequence[Footprint],
    replays: Sequence[Callable[[], object]],
    trunk_us: float,
    opened: ExitStack,
) -> dict[Footprint, Occupied]:
    """Measure residency, of which ``trunk_us`` is the whole, and look up the other tiers; after all timing.

    ``replays``: of each footprint one that was timed.
    """
    example = parts.subject.example
    runners, launches = [], []
    for point in points:
        with recording() as recorded:
            runners.append(_runner(parts, point, opened))
        launches.append(recorded[:-1])  # the last one waits for the trunk
    residency = [_residency(runner, example, of, trunk_us) for runner, of in zip(runners, launches, strict=True)]
    estimate = _estimated(replays, example)
    return {
        point: Occupied(_theoretical(parts, point), said[:-1], found, sum(launch.programs for launch in of))
        for point, of, said, found in zip(points, launches, estimate, residency, strict=True)
    }


def _residency(
    runner: OverlappedRunner, example: torch.Tensor, launches: Sequence[Residency], trunk_us: float
) -> list[Resident]:
    device = example.device
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for _ in range(REPLAYS):
        for launch in launches:
            launch.turns.fill_(-1)
        for _ in range(_BACK_TO_BACK):
            runner(example)
        torch.cuda.synchronize(device)
        said = [launch._replace(turns=launch.turns.cpu()) for launch in launches]
        found.append(resident(said, sm_count, max_warps(device), trunk_us))
    return found


def _estimated(replays: Sequence[Callable[[], object]], example: torch.Tensor) -> list[list[Estimate]]:
    """Profile each replay once."""
    order = iter([replays[0]] * WARM_UP + list(replays))
    with tempfile.TemporaryDirectory() as folder:
        trace = record_trace(lambda _x: next(order)(), example, len(replays), Path(folder) / "trace.json")
    found = estimates(trace)
    if len(found) != len(replays):
        raise RuntimeError(f"the profiler saw {len(found)} of {len(replays)} replays with heads")
    return found


def _theoretical(parts: Parts, point: Footprint) -> list[Theoretical]:
    """Ask of the kernels that do not record, which are those that are timed."""
    device = parts.subject.example.device
    with torch.cuda.device(device), torch.no_grad():
        launched = launch_beside(parts, point)
    return [theoretical(one.compiled, device) for one in launched]
