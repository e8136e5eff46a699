"""What sweeps found, printed from their records: winners, and how they compare with the rule."""

import dataclasses

import pytest
from auxhead.autotune.records.comparison import Difference
from auxhead.autotune.records.record import BadRecord, read_records
from auxhead.autotune.sweep.config_text import changes, text
from auxhead.autotune.sweep.search import AGAIN_CAPTURES, STRATEGIES
from auxhead.autotune.sweep.space import neighbours
from auxhead.autotune.sweep.winners import COLUMNS, HeadWinner, recorded_winners, self_comparison, winner_tables
from support.command_line import assert_one_line_error, tune
from support.sweep_fakes import Synthetic, records_at, run, small_target
from support.written_records import written

TARGETS = [small_target(columns=25), small_target(taps=("layer2", "layer3"))]
SHAPE, RULE = TARGETS[0].shape, TARGETS[0].rule
FIRST = neighbours(RULE, SHAPE)[0]
SAME, FASTER, NULL = (Difference(*ratios) for ratios in ((1, 1, 1), (0.9, 0.89, 0.91), (0.99, 0.97, 1.01)))
TITLE = "Heads, each alone; H200, torch 2.11, kernel 0123456789abcdef"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Records of a sweep of two heads, one configuration of which failed, and what the sweep itself found."""
    out = tmp_path_factory.mktemp("swept") / "records.jsonl"
    measurer = Synthetic(fails=lambda config: config.stages == 2 and ("prepare", "wrong answer", "off by 2"))
    return out, run(STRATEGIES["quick"], records_at(out), measurer, TARGETS)[0]


def test_records_say_what_the_sweep_found(swept):
    out, found = swept
    ((title, outcomes),) = recorded_winners(read_records(out))
    assert outcomes == found
    assert title == TITLE


def test_what_was_measured_elsewhere_is_another_table(swept):
    records = read_records(swept[0])
    other = [dataclasses.replace(one, environment={**one.environment, "torch": "0.1"}) for one in records]
    (title, _), (later, outcomes) = recorded_winners([*records, *other])
    assert title != later and "torch 0.1" in later and outcomes == swept[1]
    other = [dataclasses.replace(one, protocol={**one.protocol, "kernel": "f" * 16}) for one in records]
    ((later, outcomes),) = recorded_winners([*records, *other])
    assert later == title.replace("0123456789abcdef", "f" * 16) and outcomes == swept[1], "of the last kernel alone"


def test_what_was_measured_beside_another_rule_is_left_out(swept):
    """A record of times over an earlier rule's, which would win by far."""
    records = read_records(swept[0])
    one = next(one for one in records if one.protocol["captures"] == AGAIN_CAPTURES and one.device_us)
    fast = {**one.device_us, "samples": [[us / 2 for us in rounds] for rounds in one.device_us["samples"]]}
    earlier = dataclasses.replace(one, device_us=fast, paired=[{**one.paired[0], "variant": "earlier"}])
    assert recorded_winners([earlier, *records])[0][1] == swept[1]


def test_nulls_are_called_so():
    def row_of(config, over_rule):
        ((row,),) = [table.rows for table in winner_tables([("t", [HeadWinner(SHAPE, RULE, config, over_rule)])])]
        return row

    assert dict(zip(COLUMNS, row_of(FIRST, FASTER), strict=True)) == {
        "head": str(SHAPE),
        "rule when measured": text(RULE),
        "winner": changes(FIRST, RULE),
        "outcome": "win",
        "its time / rule's": "0.900 (0.890-0.910)",
    }
    assert row_of(FIRST, NULL)[3:] == ("win", "0.990 (0.970-1.010), no difference")
    assert row_of(RULE, SAME)[2:] == ("as by rule", "tie", "the same")
    assert row_of(None, None)[2:] == ("-", "failed", "-")


def test_a_record_without_its_configuration(swept):
    records = read_records(swept[0])
    timed = next(one for one in records if one.error is None)
    broken = dataclasses.replace(timed, protocol={**timed.protocol, "config": {}})
    with pytest.raises(BadRecord, match=rf"{swept[0]}, line \d+: protocol: config: missing"):
        recorded_winners([*records, broken])


def test_the_command(swept, tmp_path):
    drawn = tune("table", swept[0])
    assert drawn.exit_code == 0, drawn.output
    assert TITLE in drawn.stdout and "batch 8, 64x1x49, avg" in drawn.stdout
    printed = tune("table", swept[0], "--markdown")
    (table,) = winner_tables([(TITLE, swept[1])])
    assert f"**{TITLE}**\n\n| head | rule when measured |" in printed.stdout and "| --- | ---: |" in printed.stdout
    assert all(f"| {' | '.join(row)} |" in printed.stdout for row in table.rows)
    bad = written(tmp_path / "bad.jsonl", dataclasses.replace(read_records(swept[0])[0], cell={}))
    assert_one_line_error(tune("table", bad), "samples")


def of_captures(record, *us):
    """The same record of captures that took so long, in four rounds that hardly differ."""
    samples = [[one, one * 1.0001, one * 0.9999, one] for one in us]
    return dataclasses.replace(record, device_us={**record.device_us, "samples": samples})


def test_what_looks_different_from_itself_is_counted(swept):
    records = read_records(swept[0])
    timed = next(one for one in records if one.device_us)
    steady, faster = of_captures(timed, *[5.0, 5.1] * 6), of_captures(timed, *[5.0, 5.01] * 3, *[4.5, 4.51] * 3)
    few = of_captures(timed, 5.0, 5.01, 5.0, 4.5, 4.51)
    failed = next(one for one in records if one.error)
    (said,) = self_comparison([steady, faster, steady, steady, few, failed])
    assert said.startswith("A/A: of 4 configurations 1 (25.00%) look different from themselves")
    assert self_comparison([few, failed]) == []
