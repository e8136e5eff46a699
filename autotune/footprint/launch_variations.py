"""Footprints that are measured: launches of heads that differ from those by rule in one property at a time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import config_by_rule
from ..heads.in_situ import SideLaunches
from ..sweep.exclusion import excluded
from ..sweep.space import neighbours

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


def _footprint(
    name: str, shapes: Sequence[HeadShape], point: SideLaunches, config: Callable[[HeadShape], LaunchConfig]
) -> Footprint:
    return Footprint(name, tuple((shape, config(shape)) for shape in dict.fromkeys(shapes)), point)


def _stepped(steps: int, shapes: Sequence[HeadShape], point: SideLaunches) -> Footprint:
    name = f"programs x{2**steps}" if steps > 0 else f"programs /{2**-steps}"
    return _footprint(name, shapes, point, lambda shape: stepped(shape, steps))


def _changed(name: str, shapes: Sequence[HeadShape], point: SideLaunches, **fields: int) -> Footprint:
    def config(shape: HeadShape) -> LaunchConfig:
        rule = config_by_rule(shape)
        one = replace(rule, **fields)  # type: ignore[arg-type]
        # a cap of the programs is that of all heads of a launch together, few as those of one may be
        return one if "max_programs" in fields or excluded(one, shape) is None else rule

    return _footprint(name, shapes, point, config)


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
