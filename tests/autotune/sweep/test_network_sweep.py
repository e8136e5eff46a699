"""Where a network's launches leave its trunk: what is tried, kept, found and printed."""

from collections import Counter

import pytest
from auxhead.autotune.heads.forks import NetworkPoint, network_points
from auxhead.autotune.measuring.cells import resnet_cell
from auxhead.autotune.records.record import BadRecord, read_records
from auxhead.autotune.sweep.network_sweep import sweep_network
from auxhead.autotune.sweep.network_tables import COLUMNS, network_table, network_tables
from auxhead.autotune.sweep.space import neighbours, text
from support.command_line import tune
from support.network_fakes import SyntheticNetwork
from support.sweep_fakes import book_at, small_target

CELL = resnet_cell("resnet18", "float16", 8, 10, "stages")
TAPS = CELL.taps
TARGET = small_target(taps=TAPS)
HEADS = {TARGET: TARGET.rule}
BY_RULE = "forks-layer1+layer3-priority-high"
SERIAL = "forks-none-priority-high"
SAME = "forks-layer1+layer3-priority-same"
ALL = [
    BY_RULE,
    SERIAL,
    "forks-layer3-priority-high",
    "forks-layer4-priority-high",
    "forks-layer2+layer4-priority-high",
    "forks-layer1+layer2+layer3-priority-high",
    "forks-layer1+layer2+layer3+layer4-priority-high",
    SAME,
]


def swept(measurer, out=None, cell=CELL, heads=HEADS):
    failures = Counter()
    return sweep_network(measurer, cell, heads, book_at(out), failures), failures


def test_what_is_tried():
    assert [str(point) for point in network_points(TAPS, NetworkPoint(("layer1", "layer3")))] == ALL
    serial = network_points(TAPS, NetworkPoint(()))
    assert str(serial[0]) == SERIAL and all(point.trunk_first for point in serial), "no priority over nothing"


@pytest.mark.parametrize("taps", [("a",), ("a", "b"), tuple(f"block{place}" for place in range(16))])
def test_nothing_is_tried_twice_whatever_is_by_rule(taps):
    for forks in [(), *((tap,) for tap in taps), taps]:
        points = network_points(taps, NetworkPoint(forks))
        assert points[0] == NetworkPoint(forks) and len(points) == len(set(points)) <= 8
        assert all([tap for tap in taps if tap in point.forks] == list(point.forks) for point in points)


def test_a_winner_is_found_kept_and_found_again(tmp_path):
    out = tmp_path / "records.jsonl"
    measurer = SyntheticNetwork({SERIAL: 97.0, SAME: 104.0})
    found, failures = swept(measurer, out)
    assert measurer.measured == ALL and measurer.heads == [{TARGET.shape: TARGET.rule}] and not failures
    assert str(found.winner) == SERIAL and found.over_rule(found.winner).median_ratio == pytest.approx(0.97)
    records = read_records(out)
    assert [one.variant for one in records] == ALL and {one.kind for one in records} == {"network"}
    serial = records[1]
    assert serial.cell == CELL.as_json() and serial.paired[0]["variant"] == BY_RULE
    assert serial.paired[0]["device_ratio"] == pytest.approx(0.97)
    assert serial.protocol["forks"] == [] and serial.protocol["trunk"] == "feedfacecafebeef"
    assert serial.protocol["heads"] == dict.fromkeys(TAPS, text(TARGET.rule))
    assert (records[-1].protocol["trunk_priority"], serial.protocol["trunk_priority"]) == ("same", "high")
    again = SyntheticNetwork()
    assert swept(again, out)[0] == found and not again.measured
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:6]))  # it was killed
    swept(again, out)
    assert again.measured == [BY_RULE, *ALL[6:]], "the rest, beside what is by rule"


def test_what_changes_nothing_is_no_difference():
    found, _ = swept(SyntheticNetwork({SERIAL: 99.7, SAME: 110.0}))
    assert found.winner == found.by_rule
    table = network_table("t", [found])
    assert dict(zip(COLUMNS, table.rows[0], strict=True)) == {
        "network": str(CELL),
        "by rule": BY_RULE,
        "winner": "no difference",
        "its time / by rule's": "the same",
        "time with same priority / by rule's": "1.100 (1.100-1.100)",
    }
    assert table.remarks == [
        "Of 1 networks other forks or the same priority are faster in 0. "
        "With the same priority 1 of 1 are slower, 0 no different, 0 faster."
    ]


def test_of_two_that_are_tied_the_simpler_wins():
    found, _ = swept(SyntheticNetwork({"forks-layer3-priority-high": 90.0, ALL[6]: 89.9, SAME: 89.9}))
    assert str(found.winner) == "forks-layer3-priority-high"
    (row,) = network_table("t", [found]).rows
    assert row[2:4] == ("forks-layer3-priority-high", "0.900 (0.900-0.900)")


def test_failures_are_kept(tmp_path):
    out = tmp_path / "records.jsonl"
    found, failures = swept(SyntheticNetwork(fails=[SERIAL, SAME]), out)
    assert failures == {"wrong answer": 2} and len(found.times) == 6 and len(read_records(out)) == 8
    ((table,), row) = network_tables(read_records(out)), network_table("t", [found]).rows[0]
    assert table.rows == [row] and row[-1] == "-"
    found, failures = swept(SyntheticNetwork(fails=[BY_RULE]), tmp_path / "none.jsonl")
    assert found.winner is None and failures == {"wrong answer": 1}
    (table,) = network_tables(read_records(tmp_path / "none.jsonl"))
    assert table.rows == [(str(CELL), BY_RULE, "-", "-", "-")]


def test_other_heads_make_another_sweep_of_which_the_last_counts(tmp_path):
    out = tmp_path / "records.jsonl"
    swept(SyntheticNetwork({SERIAL: 50.0}), out)
    later = SyntheticNetwork()
    found, _ = swept(later, out, heads={TARGET: neighbours(TARGET.rule, TARGET.shape)[0]})
    assert later.measured == ALL
    other = resnet_cell("resnet18", "float16", 8, 10, "inner-stages")
    elsewhere, _ = swept(SyntheticNetwork(), out, cell=other)
    (table,) = network_tables(read_records(out))
    title = "Where launches leave the trunk; H200, torch 2.11, kernel 0123456789abcdef"
    assert table == network_table(title, [found, elsewhere])
    printed = tune("table", out, "--markdown")
    assert f"**{title}**" in printed.stdout and f"| {' | '.join(table.rows[0])} |" in printed.stdout
    assert tune("promote", out).exit_code == 2, "nothing of it is promoted"
    with pytest.raises(BadRecord, match=r"got no record of forks-layer1\+layer3-priority-high"):
        network_tables(read_records(out)[1:2])
