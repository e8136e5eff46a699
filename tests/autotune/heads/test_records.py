"""Records of heads alone: what is kept of a measurement, when it is made again, and the table of it."""

import dataclasses

import pytest
from auxhead.autotune.heads.tables import COLUMNS, head_tables
from auxhead.autotune.measuring.failures import Failure
from auxhead.autotune.measuring.head_timing import COPIED
from auxhead.autotune.records.heads import last_runs
from auxhead.autotune.records.record import read_records
from support.head_fakes import COPIES, a_head, head_of, head_record, records_at, timed

VARIANTS = ["fused", "eager", "compiled", "bytes"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "heads.jsonl"


def test_a_line_a_variant(path):
    head = head_of(taps=("layer1", "layer2"))
    records_at(path).add(head, timed(), COPIES, {"sm_mhz": 1980.0})
    records = {record.variant: record for record in read_records(path)}
    assert list(records) == VARIANTS and len({record.run for record in records.values()}) == 1
    for record in records.values():
        assert record.kind == "heads" and record.error is None and record.environment["clocks"] == {"sm_mhz": 1980.0}
        assert record.cell == head.cell and record.cell["tap"] == "layer1, layer2"
        assert record.protocol["config"] == dataclasses.asdict(head.config)
    fused, eager = records["fused"], records["eager"]
    assert fused.paired == [] and len(fused.device_us["samples"]) == 5
    assert (fused.device_us["median"], fused.device_us["captures"]) == (4.0, [3.96, 3.98, 4.0, 4.02, 4.04])
    (pair,) = eager.paired
    assert pair["role"] == "fused" and pair["device_us"] == pytest.approx(4.0, rel=1e-3)
    assert pair["device_ratio"] == pytest.approx(4.5) and 4.3 < pair["low"] < 4.5 < pair["high"] < 4.7
    least = records["bytes"]
    assert least.device_us["median"] == pytest.approx(
        0.5
    )  # a thousandth of COPIED bytes, of which 2,000 thousandths take 1,000 us
    assert least.protocol["bytes"] == COPIED // 1000 and least.protocol["captures"] == 1
    assert least.protocol["bytes_per_second"] == pytest.approx(2 * COPIED * 1000)


def test_no_bytes_take_no_time(path):
    """Tables divide by it."""
    records_at(path).add(head_of()._replace(bytes_moved=100), timed(), COPIES, None)
    assert read_records(path)[-1].device_us["median"] > 0


def test_what_is_there_is_not_measured_again(path):
    head = head_of()
    assert not records_at(path).has(head)
    kept = records_at(path)
    kept.add(head, timed(), COPIES, None)
    assert kept.has(head) and records_at(path).has(head)
    assert records_at(path, {"commit": "another", "clocks": None}).has(head)
    for changed in (head_of(classes=100), head_of(samples=1), head_of(taps=("layer2",)), head_of(model="resnet34")):
        assert not records_at(path).has(changed)
    assert not records_at(path).has(head._replace(config=dataclasses.replace(head.config, num_warps=2)))
    assert not records_at(path, {"driver": "581"}).has(head) and not records_at(path, {"sm_count": 66}).has(head)
    assert not records_at(path, protocol={"kernel": "another"}).has(head)


def test_failures_are_records_and_tried_again_when_the_code_has_changed(path):
    head = head_of()
    results = {**timed(), "compiled": Failure("RuntimeError", "out of resource: shared memory")}
    records_at(path).add(head, results, COPIES, None)
    failed = read_records(path)[2]
    assert (failed.variant, failed.error) == ("compiled", "RuntimeError: out of resource: shared memory")
    assert failed.device_us is None and failed.paired == []
    assert records_at(path).has(head)
    assert not records_at(path, {"commit": "another"}).has(head)
    records_at(path, {"commit": "c-dirty"}).add(head, results, COPIES, None)
    assert not records_at(path, {"commit": "c-dirty"}).has(head)


def test_the_table():
    records = [*a_head(classes=1000, samples=1), *a_head(), *a_head(samples=1, tap="layer2, layer3", channels=128)]
    (table,) = head_tables(records)
    assert table.title.startswith("Heads of resnet18 alone, float16, channels_last, avg; H200, torch 2.11; ")
    assert table.columns == COLUMNS and table.remarks == []
    numbers = ("3.50 (3.25-4.00)", "0.76", "1,750.00", "5.00 (4.90-5.10)", "7.00", "2.00 (1.95-2.05)")
    assert table.rows == [
        ("10", "1", "layer2, layer3", "128x1x3136", *numbers),
        ("10", "8", "layer1", "64x1x3136", *numbers),
        ("1,000", "1", "layer1", "64x1x3136", *numbers),
    ]


def test_a_table_each():
    others = ({"dtype": "float32"}, {"model": "a:b"}, {"layout": "strided"}, {"pool": "max"}, {"gpu": "H100"})
    tables = head_tables([*a_head(), *(record for other in others for record in a_head(**other))])
    assert len(tables) == 6 and all(len(table.rows) == 1 for table in tables)
    (windows,) = head_tables(a_head(height=14, width=14, grid_h=2, grid_w=3))
    assert windows.rows[0][3] == "64x14x14 in 2x3 windows"


def test_a_row_is_one_run():
    """Ratios are to the fused head of that row: the last one, unless only an earlier one was timed."""
    earlier, later = a_head(), a_head("r2", fused=3.0)
    lost = [head_record(variant, "r3", error="DeviceLost: gone") for variant in ("fused", "eager", "compiled")]
    killed = a_head("r4", fused=2.5)[:1]
    assert head_tables([*earlier, *later])[0].rows[0][4] == "3.00 (2.75-3.50)"
    assert [[*run] for run in last_runs([*earlier, *later, *lost])] == [VARIANTS]
    assert head_tables([*later, *lost]) == head_tables(later)
    (table,) = head_tables([*earlier, *killed])
    assert table.rows[0][4:] == ("2.50 (2.25-3.00)", *["-"] * 5)
    (table,) = head_tables(lost)
    assert table.rows[0][4:] == ("failed", "-", "failed", "-", "failed", "-") and len(table.remarks) == 3
