"""Footprints: which launches are measured, how much of the SMs they take, and what records and figure say of it."""

import pytest
import torch
from auxhead.autotune.overlap.footprints import footprints_of, residency, with_programs
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.kernels.launch.residency import Residency

#: One of each kind.
NAMES = ("by rule", "programs x8", "16 warps a program", "64 registers", "4 SMs", "same priority")


def shape_of(batch, channels, size, classes=10):
    view = head_view((batch, channels, size, size), (channels * size * size, size * size, size, 1), "avg", (1, 1))
    return HeadShape.of(view, classes, pool_max=False, dtype=torch.float16)


SHAPES = [shape_of(8, 64, 56), shape_of(8, 512, 7)]


def test_each_changes_one_thing_of_some_head():
    rule, *others = footprints_of(SHAPES)
    assert rule.name == "by rule" and rule.configs == {shape: config_by_rule(shape) for shape in SHAPES}
    by_name = {one.name: one for one in others}
    assert len(by_name) == len(others) >= 10 and set(NAMES[1:]) <= set(by_name)
    for one in others:
        assert one.configs != rule.configs or one.runner is not rule.runner
    assert {config.max_programs for config in by_name["4 SMs"].configs.values()} == {4}
    assert 16 in {config.num_warps for config in by_name["16 warps a program"].configs.values()}
    assert by_name["same priority"].runner.trunk_priority == 0 != rule.runner.trunk_priority
    assert by_name["programs x8, same priority"].configs == by_name["programs x8"].configs


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_change_how_many_programs_there_are(shape):
    counts = [with_programs(shape, steps).programs(shape.view, shape.classes).total for steps in (-2, -1, 0, 1, 2, 3)]
    assert counts == sorted(counts) and counts[0] < counts[2] < counts[-1]


def test_residency_is_of_all_warps_over_the_time():
    """Two programs of 4 warps for 1 and 3 us on one SM, overlapping; one of 8 warps for 2 us on another."""
    turns = [torch.tensor([[0, 1_000, 2_000], [0, 1_500, 4_500]]), torch.tensor([[3, 2_000, 4_000]])]
    launches = [Residency(turns[0], 2, 4), Residency(turns[1], 1, 8)]
    found = residency(launches, sm_count=4, sm_warps=64, span_us=10.0)
    assert found == pytest.approx(
        {"warps_share": (4 * 4 + 8 * 2) / (4 * 64 * 10), "sm_share": 5.5 / 40, "sms": 2, "us": 3.5}
    )
    for wrong in ([[-1, -1, -1]], [[4, 1, 2]], [[0, 2, 1]]):
        with pytest.raises(ValueError, match="turns: "):
            residency([Residency(torch.tensor(wrong), 1, 4)], sm_count=4, sm_warps=64, span_us=10.0)
