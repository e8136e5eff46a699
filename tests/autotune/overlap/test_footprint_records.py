"""Records and tables of footprints, and the command, without a GPU."""

import pytest
from auxhead.autotune.measuring.heads_in_situ import SideLaunches
from auxhead.autotune.overlap.footprints import BY_RULE
from auxhead.autotune.overlap.occupancy import TIERS
from auxhead.autotune.overlap.records import FOOTPRINT, failed_record
from auxhead.autotune.overlap.tables import footprint_tables
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.config_text import text
from auxhead.kernels.launch.launch_rule import config_by_rule
from support.command_line import assert_one_line_error, tune
from support.footprint_fakes import CELL, FORKS, TRUNK_US, records, shapes
from support.pretended_gpu import ENVIRONMENT
from support.written_records import written

POINT = SideLaunches(FORKS)


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
    assert list(occupancy) == list(TIERS) and not any(one.notes for one in kept)
    share = occupancy["residency"]["warps_share"]
    assert share["p20"] < share["median"] < share["p80"]
    assert [one["share"] for one in occupancy["theoretical"]] == [0.3125] * 2
    assert rule.protocol["trunk_priority"] == "high" and same.protocol["trunk_priority"] == "same"
    assert rule.protocol["heads"] == {tap: text(config_by_rule(shape)) for tap, shape in shapes().items()}
    assert rule.protocol["forks"] == list(FORKS) and rule.cell == CELL.as_json()


def test_tables():
    kept = records(fails="64 registers")
    (table,) = footprint_tables([*kept, *kept])
    assert len(table.rows) == len(kept) - 1 and "batch 1, 10 classes" in table.title
    row = next(row for row in table.rows if row[0] == BY_RULE)
    assert row[-2:] == ("31, 31", "0?, 3") and row[1] == "48"
    said = "\n".join(table.remarks)
    assert "64 registers: not measured: OutOfResources" in said and "after layer1, layer3" in said
    assert "recording residency takes +0.6 %" in said
    two = footprint_tables([*kept, failed_record(FOOTPRINT, CELL, "ValueError: forks", {**ENVIRONMENT, "gpu": "A100"})])
    assert [len(one.rows) for one in two] == [len(kept) - 1, 0] and two[1].remarks == [
        "by rule: not measured: ValueError: forks"
    ]


def test_the_commands(tmp_path):
    shown = tune("table", written(tmp_path / "records.jsonl", *records()))
    assert shown.exit_code == 0 and "programs x8, same priority" in shown.output
    assert_one_line_error(tune("overlap", "resnet18", "--footprints"), "footprint: torch sees no CUDA device here")
