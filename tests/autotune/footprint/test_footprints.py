"""Footprints: what is swept, what is kept of it, and what its tables say; without a GPU."""

from collections import Counter

import pytest
from auxhead.autotune.footprint.footprints import BY_RULE, footprints, stepped
from auxhead.autotune.footprint.records import failed_record
from auxhead.autotune.footprint.tables import footprint_tables
from auxhead.autotune.heads.in_situ import SideLaunches
from auxhead.autotune.measuring.occupancy import TIERS
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.config_text import text
from auxhead.autotune.sweep.exclusion import excluded
from support.command_line import assert_one_line_error, tune
from support.footprint_fakes import CELL, FORKS, NOT_COUNTED, TRUNK_US, records, shapes
from support.pretended_gpu import ENVIRONMENT
from support.written_records import written

POINT = SideLaunches(FORKS)


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_what_is_swept(batch, classes):
    of_heads = list(shapes(batch, classes).values())
    found = footprints(of_heads, POINT)
    assert found[0] == (BY_RULE, tuple((shape, shape.by_rule()) for shape in of_heads), POINT)
    assert 12 <= len(found) <= 18 and max(Counter(one.name for one in found).values()) == 1
    assert len({(one.configs, one.point) for one in found}) == len(found), "nothing twice"
    assert {one.point for one in found} == {POINT, POINT._replace(trunk_first=False)}
    configs = [(shape, config) for one in found for shape, config in one.configs]
    changed = [(shape, config) for shape, config in configs if config != shape.by_rule() and not config.max_programs]
    assert changed and all(excluded(config, shape) is None for shape, config in changed)
    caps = [config.max_programs for one in found for _, config in one.configs if one.name.endswith("SMs")]
    assert caps == [cap for cap in (4, 16, 64) for _ in of_heads]


def test_steps_towards_more_and_fewer_programs():
    shape = shapes(8)["layer2"]

    def programs(steps):
        return stepped(shape, steps).programs(shape.view, shape.classes).total

    assert [programs(steps) for steps in (-2, -1, 0, 1, 2, 3)] == [16, 32, 64, 128, 256, 512]
    assert stepped(shape, 0) == shape.by_rule()
    assert {stepped(shape, steps).num_warps for steps in (-2, 3)} == {shape.by_rule().num_warps}


def test_what_is_kept_of_a_footprint(tmp_path):
    kept = records(fails="64 registers")
    found = {one.variant: one for one in read_records(written(tmp_path / "records.jsonl", *kept))}
    assert list(found.values()) == kept and len({one.run for one in kept}) == 1
    assert found["64 registers"].error == "OutOfResources: registers" and found["64 registers"].measured is None
    rule, more, same = (found[name] for name in (BY_RULE, "programs x8", "same priority"))
    trunk = rule.paired[0]
    assert [pair["role"] for pair in rule.paired] == ["trunk", "heads", "recorded"]
    assert [pair["role"] for pair in more.paired] == ["trunk", "heads"]
    both = rule.device_us["median"]
    assert trunk["device_ratio"] == pytest.approx(both / TRUNK_US, abs=0.002)
    assert trunk["low"] < trunk["device_ratio"] < trunk["high"]
    assert rule.measured["hiding_efficiency"]["median"] == pytest.approx((TRUNK_US + 12.0 - both) / 12.0, abs=0.05)
    occupancy = rule.measured["occupancy"]
    assert list(occupancy) == list(TIERS) and occupancy["ncu"] is None
    assert rule.notes == more.notes == [NOT_COUNTED.absent] and not found["64 registers"].notes
    share = occupancy["residency"]["warps_share"]
    assert share["p20"] < share["median"] < share["p80"]
    assert [one["share"] for one in occupancy["theoretical"]] == [0.3125] * 2
    assert rule.measured["trunk_room"]["by_sm"] == [0.75] * 66 + [0.25] * 66 and "trunk_room" not in more.measured
    assert rule.protocol["trunk_priority"] == "high" and same.protocol["trunk_priority"] == "same"
    assert rule.protocol["heads"] == {tap: text(shape.by_rule()) for tap, shape in shapes().items()}
    assert rule.protocol["forks"] == list(FORKS) and rule.cell == CELL.as_json()


def test_tables():
    kept = records(fails="64 registers")
    (table,) = footprint_tables([*kept, *kept])
    assert len(table.rows) == len(kept) - 1 and "batch 1, 10 classes" in table.title
    row = next(row for row in table.rows if row[0] == BY_RULE)
    assert row[-3:] == ("31, 31", "0?, 3", "-") and row[1] == "48"
    assert table.remarks.count(NOT_COUNTED.absent) == 1
    said = "\n".join(table.remarks)
    assert "64 registers: not measured: OutOfResources" in said and "after layer1, layer3" in said
    assert "leaves 50 % of the places" in said and "from 25 to 75 % by SM; asking took +25 %" in said
    assert "recording residency takes +0.6 %" in said
    two = footprint_tables([*kept, failed_record(CELL, "ValueError: forks", {**ENVIRONMENT, "gpu": "A100"})])
    assert [len(one.rows) for one in two] == [len(kept) - 1, 0] and two[1].remarks == [
        "by rule: not measured: ValueError: forks"
    ]


def test_what_nsight_compute_counts():
    kept = records(percent=(6.25, 12.04))
    assert all(one.measured["occupancy"]["ncu"] == [{"percent": 6.25}, {"percent": 12.04}] for one in kept)
    assert not any(one.notes for one in kept)
    (table,) = footprint_tables(kept)
    assert table.columns[-1] == "warps of an SM, % (Nsight Compute)" and {row[-1] for row in table.rows} == {
        "6.2, 12.0"
    }
    assert "absent" not in "\n".join(table.remarks)


def test_the_commands(tmp_path):
    shown = tune("table", written(tmp_path / "records.jsonl", *records()))
    assert shown.exit_code == 0 and "programs x8, same priority" in shown.output
    assert_one_line_error(tune("footprint", "resnet18"), "footprint: torch sees no CUDA device here")
