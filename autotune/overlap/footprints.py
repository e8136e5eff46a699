"""Footprints: heads launched with other programs, warps, registers and SMs than by rule; what each costs, and its room.

The room is measured as *residency*: each program of an instrumented launch writes down its SM, start and end. Launches
that pack features for others do not.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...kernels.launch.choose_config import overriding
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import config_beside_trunk, config_by_rule
from ...kernels.launch.residency import Residency, recording
from ...model.runners.overlapped import OverlappedRunner
from ...model.trunk.timed_convolutions import fastest_convolutions
from ..measuring.captured import CHAIN
from ..measuring.cells import NEVER, Cell
from ..measuring.failures import Failure
from ..measuring.progress import Begins
from ..measuring.subject import Subject
from ..measuring.timers import PROTOCOL, block_length, time_rounds
from ..records.comparison import typical
from ..records.intervals import Interval, length, merged
from ..records.record import Record
from ..records.summaries import Timings, as_json, percentiles, summary
from ..sweep.config_text import text
from ..sweep.exclusion import excluded
from ..sweep.space import neighbours
from .measure import paired_parts
from .metrics import hiding_efficiency
from .network_parts import BARE, BOTH, HEADS, NetworkParts
from .replays import check_turns

#: The kind of these records, and the footprint that all others are compared with.
FOOTPRINT, BY_RULE = "footprint", "by rule"
#: Changes of the rule's launch, by the name of the footprint.
CHANGES: Mapping[str, Mapping[str, int]] = {
    **{f"{count} warps a program": {"num_warps": count} for count in (2, 16)},
    **{f"{count} registers": {"max_registers": count} for count in (32, 64)},
    **{f"{count} SMs": {"max_programs": count} for count in (4, 16, 64)},
}
#: Steps towards fewer programs and more: each about halves or doubles them.
STEPS = (-2, -1, 1, 2, 3)
#: Fields that such a step leaves as they are.
_KEPT = ("block_n", "block_f", "num_warps", "waits", "max_registers", "max_programs", "weight_buffers")
#: Fresh captures of everything, timed rounds of each, and replays whose residency is summed up.
CAPTURES, ROUNDS, REPLAYS = 3, 15, 7


class SamePriority(OverlappedRunner):
    """Waiting blocks of trunk and heads are placed as they come."""

    trunk_priority = 0


class Footprint(NamedTuple):
    """Launches of all heads of a network beside its trunk."""

    name: str
    configs: Mapping[HeadShape, LaunchConfig]
    runner: type[OverlappedRunner] = OverlappedRunner


def footprints_of(shapes: Sequence[HeadShape]) -> list[Footprint]:
    """Return the footprints to measure of heads of these shapes, the one by rule first.

    A change that some head cannot take leaves that head by rule; one that changes nothing is left out.
    """

    def changed(shape: HeadShape, fields: Mapping[str, int]) -> LaunchConfig:
        rule = _by_rule(shape)
        one = replace(rule, **fields)  # type: ignore[arg-type]
        # a cap of the programs is that of all heads of a launch together, few as those of one may be
        return one if "max_programs" in fields or excluded(one, shape) is None else rule

    rule = {shape: _by_rule(shape) for shape in shapes}
    found = [Footprint(BY_RULE, rule)]
    found += [
        Footprint(f"programs x{2**steps}" if steps > 0 else f"programs /{2**-steps}", configs)
        for steps in STEPS
        if (configs := {shape: with_programs(shape, steps) for shape in shapes}) != rule
    ]
    most = found[-1]
    found += [
        Footprint(name, configs)
        for name, fields in CHANGES.items()
        if (configs := {shape: changed(shape, fields) for shape in shapes}) != rule
    ]
    same = "same priority"
    return [*found, Footprint(same, rule, SamePriority), Footprint(f"{most.name}, {same}", most.configs, SamePriority)]


def _by_rule(shape: HeadShape) -> LaunchConfig:
    return config_beside_trunk(shape, config_by_rule(shape))


def with_programs(shape: HeadShape, steps: int) -> LaunchConfig:
    """Return a configuration with more programs than the rule's, or with fewer if ``steps`` is negative.

    It multiplies in the same way with as many warps; each step goes to the neighbour with most or fewest programs.
    """
    config = _by_rule(shape)
    for _ in range(abs(steps)):
        same = [one for one in neighbours(config, shape) if all(getattr(one, f) == getattr(config, f) for f in _KEPT)]
        config = (max if steps > 0 else min)(
            [config, *same], key=lambda one: one.programs(shape.view, shape.classes).total
        )
    return config


class FootprintsMeasured(NamedTuple):
    """Times and residency of one network with every footprint."""

    footprints: Sequence[Footprint]
    bare: Timings
    """Microseconds of the trunk alone, [captures][rounds]."""
    times: Mapping[tuple[str, str], Timings]
    """Microseconds, by ``BOTH`` or ``HEADS`` and the footprint's name; of heads those of one chain's link."""
    residency: Mapping[str, list[Mapping[str, float]]]
    """See :func:`residency`, by name; one for each of ``REPLAYS``."""
    programs: Mapping[str, int]
    """Programs of all launches beside the trunk, but of those that pack features."""
    failed: Mapping[str, Failure]
    heads: Mapping[str, HeadShape]
    """Shapes by tap."""
    protocol: Mapping[str, Any]


def measure_footprints(subject: Subject, begins: Begins) -> FootprintsMeasured:
    """Capture a network with every footprint, check answers, time all in the same rounds, then measure residency.

    Raises:
        WrongAnswer: the bare trunk answers wrongly.
        ValueError: no launch leaves the trunk by rule.
        RuntimeError: a capture or call of the trunk fails, or the footprint by rule.
    """
    device, batch = subject.example.device, len(subject.example)
    with ExitStack() as opened, fastest_convolutions(batch), subject.exits(NEVER):
        begins("trunk", 0.1)
        parts = NetworkParts(subject, opened)
        if not parts.forks:
            raise ValueError(
                "forks: got none by rule, wants launches beside the trunk: its batch or depth is too small"
            )
        heads = {tap: head.shape for tap, head in zip(subject.network.taps, parts.heads, strict=True)}
        footprints = footprints_of(list(dict.fromkeys(heads.values())))
        calls: dict[tuple[str, str], list[Callable[[], object]]] = {
            (BARE, ""): [parts.capture(BARE) for _ in range(CAPTURES)]
        }
        recorded: dict[str, tuple[Callable[[], object], list[Residency]]] = {}
        failed: dict[str, Failure] = {}
        for index, (name, configs, runner) in enumerate(footprints):
            begins(f"captures of {name}", 0.2 + 0.4 * index / len(footprints))
            try:
                with overriding(configs):
                    both = [parts.both(runner) for _ in range(CAPTURES)]
                    alone = [parts.capture(HEADS) for _ in range(CAPTURES)]
                    with recording() as launches:
                        recorded[name] = parts.both(runner), launches
                calls |= {(BOTH, name): both, (HEADS, name): alone}
            except (RuntimeError, ValueError) as error:
                if name == BY_RULE:
                    raise
                failed[name] = Failure.of(error)
        begins("timing", 0.65)
        repeat = block_length({BARE: calls[BARE, ""]}, device, least=2)
        times = time_rounds(calls, device, rounds=ROUNDS, repeat=repeat)
        times |= {key: [[us / CHAIN for us in one] for one in found] for key, found in times.items() if key[0] == HEADS}
        begins("residency", 0.85)
        span_us = typical(times[BARE, ""])
        # the last launch waits for the trunk
        turned = {name: [_replayed(call, launches[:-1], device, span_us) for _ in range(REPLAYS)]
                  for name, (call, launches) in recorded.items()}  # fmt: skip
        programs = {name: sum(one.programs for one in launches[:-1]) for name, (_, launches) in recorded.items()}
        how = {"captures": CAPTURES, "rounds": ROUNDS, "repeat": repeat, "residency_replays": REPLAYS}
        protocol = {**how, **PROTOCOL, **parts.protocol}
        return FootprintsMeasured(footprints, times.pop((BARE, "")), times, turned, programs, failed, heads, protocol)


def _replayed(
    replay: Callable[[], object], launches: Sequence[Residency], device: torch.device, span_us: float
) -> Mapping[str, float]:
    for launch in launches:
        launch.turns.fill_(-1)
    for _ in range(3):  # the last of some back to back, as those that are timed are
        replay()
    torch.cuda.synchronize(device)
    of = torch.cuda.get_device_properties(device)
    turned = [launch._replace(turns=launch.turns.cpu()) for launch in launches]
    sm_warps = of.max_threads_per_multi_processor // of.warp_size
    return residency(turned, of.multi_processor_count, sm_warps, span_us)


def residency(launches: Sequence[Residency], sm_count: int, sm_warps: int, span_us: float) -> Mapping[str, float]:
    """Return how much of the SMs the launches of one replay took, by their own recording.

    Args:
        launches: with turns on the CPU.
        sm_count: SMs of the device.
        sm_warps: warps that an SM holds.
        span_us: time that shares are of, microseconds: that of the trunk.

    Returns:
        warps_share: warps of head programs, over time, of all that the SMs hold; sm_share: time in which SMs held any
        head program, of the time of all SMs; sms: how many did; us: from the first program's start to the last's end.

    Raises:
        ValueError: a program did not run, or its row makes no sense.
    """
    lanes: dict[int, list[Interval]] = {}
    warps_us = 0.0
    for launch in launches:
        check_turns(launch, sm_count)
        for sm, start, end in launch.turns.tolist():
            lanes.setdefault(sm, []).append((start / 1e3, end / 1e3))
        warps_us += launch.num_warps * (launch.turns[:, 2] - launch.turns[:, 1]).sum().item() / 1e3
    occupied = [merged(lane) for lane in lanes.values()]
    of_all = sm_count * span_us
    return {
        "warps_share": warps_us / (of_all * sm_warps),
        "sm_share": sum(map(length, occupied)) / of_all,
        "sms": float(len(lanes)),
        "us": max(lane[-1][1] for lane in occupied) - min(lane[0][0] for lane in occupied),
    }


def footprint_records(cell: Cell, measured: FootprintsMeasured, environment: dict[str, Any]) -> list[Record]:
    """Return a record of each footprint of a network, the one by rule first."""
    run, found = secrets.token_hex(6), []
    for name, configs, runner in measured.footprints:
        protocol = {
            **measured.protocol,
            "trunk_priority": "same" if runner is SamePriority else "high",
            "heads": {tap: text(configs[shape]) for tap, shape in measured.heads.items()},
        }
        if name in measured.failed:
            rest: dict[str, Any] = {"error": str(measured.failed[name])}
        else:
            both, heads = measured.times[BOTH, name], measured.times[HEADS, name]
            of_replays = measured.residency[name]
            shares = {key: percentiles([one[key] for one in of_replays]) for key in of_replays[0]}
            details = {
                "hiding_efficiency": hiding_efficiency(measured.bare, heads, both),
                "programs": measured.programs[name],
                "occupancy": {"residency": shares},
            }
            paired = paired_parts(measured.bare, heads, both)
            rest = as_json({"device_us": summary(both), "paired": paired, "measured": details})
        found.append(Record(FOOTPRINT, cell.as_json(), name, run, environment, protocol, **rest))
    return found
