"""Footprints that are measured: which launches, and steps towards more and fewer programs."""

from collections import Counter

import pytest
from auxhead.autotune.measuring.heads_in_situ import SideLaunches
from auxhead.autotune.overlap.footprints import BY_RULE, footprints_to_measure, stepped
from auxhead.autotune.sweep.exclusion import excluded
from auxhead.kernels.launch.launch_rule import config_by_rule
from support.footprint_fakes import FORKS, shapes

POINT = SideLaunches(FORKS)


@pytest.mark.parametrize(("batch", "classes"), [(1, 10), (8, 1000), (32, 10)])
def test_what_is_swept(batch, classes):
    of_heads = list(shapes(batch, classes).values())
    found = footprints_to_measure(of_heads, POINT)
    assert found[0] == (BY_RULE, tuple((shape, config_by_rule(shape)) for shape in of_heads), POINT)
    assert 12 <= len(found) <= 18 and max(Counter(one.name for one in found).values()) == 1
    assert len({(one.configs, one.point) for one in found}) == len(found), "nothing twice"
    assert {one.point for one in found} == {POINT, POINT._replace(trunk_first=False)}
    configs = [(shape, config) for one in found for shape, config in one.configs]
    changed = [
        (shape, config) for shape, config in configs if config != config_by_rule(shape) and not config.max_programs
    ]
    assert changed and all(excluded(config, shape) is None for shape, config in changed)
    caps = [config.max_programs for one in found for _, config in one.configs if one.name.endswith("SMs")]
    assert caps == [cap for cap in (4, 16, 64) for _ in of_heads]


def test_steps_towards_more_and_fewer_programs():
    shape = shapes(8)["layer2"]

    def programs(steps):
        return stepped(shape, steps).programs(shape.view, shape.classes).total

    assert [programs(steps) for steps in (-2, -1, 0, 1, 2, 3)] == [16, 32, 64, 128, 256, 512]
    assert stepped(shape, 0) == config_by_rule(shape)
    assert {stepped(shape, steps).num_warps for steps in (-2, 3)} == {config_by_rule(shape).num_warps}
