"""What sweeps found, printed from their records: winners alone and in situ, and how they compare."""

import dataclasses

import pytest
from auxhead.autotune.measuring.heads_alone import NETWORK
from auxhead.autotune.records.comparison import Difference
from auxhead.autotune.records.record import BadRecord, read_records
from auxhead.autotune.sweep.config_text import changes
from auxhead.autotune.sweep.search import STRATEGIES
from auxhead.autotune.sweep.space import neighbours
from auxhead.autotune.sweep.winners import (
    COLUMNS,
    HeadWinners,
    recorded_winners,
    self_comparison,
    summary,
    winner_tables,
)
from support.command_line import assert_one_line_error, tune
from support.sweep_fakes import Synthetic, records_at, run, small_target
from support.written_records import written

TARGETS = [small_target(), small_target(columns=25, taps=("layer2", "layer3"))]
RULE = TARGETS[0].rule
FIRST, SECOND = neighbours(RULE, TARGETS[0].shape)[:2]
SAME, FASTER, NULL, SLOWER = (
    Difference(*ratios) for ratios in ((1, 1, 1), (0.9, 0.89, 0.91), (0.99, 0.97, 1.01), (1.1, 1.09, 1.11))
)


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
    assert title == "resnet18 float16, batch 8, 10 classes; H200, torch 2.11, kernel 0123456789abcdef"


def test_what_was_measured_elsewhere_is_another_table(swept, tmp_path):
    records = read_records(swept[0])
    other = [dataclasses.replace(one, environment={**one.environment, "torch": "0.1"}) for one in records]
    (title, _), (later, outcomes) = recorded_winners([*records, *other])
    assert title != later and "torch 0.1" in later and outcomes == swept[1]
    other = [dataclasses.replace(one, protocol={**one.protocol, "kernel": "f" * 16}) for one in records]
    ((later, outcomes),) = recorded_winners([*records, *other])
    assert later == title.replace("0123456789abcdef", "f" * 16) and outcomes == swept[1], "of the last kernel alone"
    in_situ = [one for one in records if one.protocol["place"] == NETWORK]
    ((_, outcomes),) = recorded_winners(in_situ)
    assert [one.alone for one in outcomes] == [None, None] and outcomes[0].network == swept[1][0].network


def test_what_was_measured_beside_another_rule_is_left_out(swept):
    """A record of times over an earlier rule's, which would win by far."""
    records = read_records(swept[0])
    one = next(one for one in records if one.protocol["place"] == NETWORK and one.device_us)
    fast = {**one.device_us, "samples": [[us / 2 for us in rounds] for rounds in one.device_us["samples"]]}
    earlier = dataclasses.replace(one, device_us=fast, paired=[{**one.paired[0], "variant": "earlier"}])
    assert recorded_winners([earlier, *records])[0][1] == swept[1]


def test_of_several_forks_those_that_were_timed_most_often_and_last_decide(swept):
    """Forks go by times of the trunk, so that the next sweep of a network may choose others."""
    records = read_records(swept[0])

    def elsewhere(one):
        """The same, had launches left the trunk elsewhere, but for the rule's configuration twice as fast."""
        us = {**one.device_us, "samples": [[us / 2 for us in rounds] for rounds in one.device_us["samples"]]}
        fast = us if one.variant != one.paired[0]["variant"] else one.device_us
        return dataclasses.replace(one, device_us=fast, protocol={**one.protocol, "forks": ["layer9"]})

    in_situ = [one for one in records if one.protocol["place"] == NETWORK and one.device_us]
    ((_, outcomes),) = recorded_winners([*map(elsewhere, in_situ), *records])
    assert outcomes == swept[1]
    first = [elsewhere(one) for one in in_situ if one.cell["tap"] == "layer1"]
    ((_, (changed, same)),) = recorded_winners([*records, *first])
    assert changed.over_rule.median_ratio < 0.6 and same == swept[1][1], "a sweep that was stopped there"


def found(network, over_rule, over_alone, alone=FIRST):
    return HeadWinners(TARGETS[0], RULE, alone, FASTER, network, over_rule, over_alone)


def test_nulls_are_called_so():
    def row_of(*arguments):
        ((row,),) = [table.rows for table in winner_tables([("t", [found(*arguments)])])]
        return row

    row = row_of(FIRST, NULL, SAME)
    assert dict(zip(COLUMNS, row, strict=True)) == {
        "taps": "layer1",
        "by rule": row[1],
        "winner alone": changes(FIRST, RULE),
        "winner in situ": changes(FIRST, RULE),
        "outcome": "win",
        "its time / rule's, alone": "0.900 (0.890-0.910)",
        "network's time / with rule's": "0.990 (0.970-1.010), no difference",
        "network's time / with winner alone": "the same",
    }
    row = row_of(RULE, SAME, SLOWER)
    assert row[3:5] == ("as by rule", "tie") and row[6:] == ("the same", "1.100 (1.090-1.110)")
    row = row_of(None, None, None)
    assert row[3:5] == ("-", "failed") and row[6:] == ("-", "-")


def test_the_summary_counts():
    outcomes = [
        found(SECOND, FASTER, FASTER), found(SECOND, NULL, NULL), found(FIRST, FASTER, SAME), found(RULE, SAME, SLOWER),
        found(None, None, None),
    ]  # fmt: skip
    assert summary(outcomes) == [
        "Whole network, winner in situ against the winner alone: of 5 heads 1 faster, 2 no difference "
        "(1 the same configuration), 1 slower, 1 not compared.",
        "Whole network, winner in situ against the rule's configuration: of 5 heads 2 faster, 2 no difference "
        "(1 the same configuration), 0 slower, 1 not compared.",
    ]


def test_a_record_without_its_configuration(swept):
    records = read_records(swept[0])
    timed = next(one for one in records if one.error is None)
    broken = dataclasses.replace(timed, protocol={**timed.protocol, "config": {}})
    with pytest.raises(BadRecord, match=rf"{swept[0]}, line \d+: protocol: config: missing"):
        recorded_winners([*records, broken])


def test_the_command(swept, tmp_path):
    drawn = tune("table", swept[0])
    assert drawn.exit_code == 0, drawn.output
    title = "resnet18 float16, batch 8, 10 classes; H200, torch 2.11, kernel 0123456789abcdef"
    assert title in drawn.stdout and "layer2, layer3" in drawn.stdout
    printed = tune("table", swept[0], "--markdown")
    (table,) = winner_tables([(title, swept[1])])
    assert f"**{title}**\n\n| taps | by rule |" in printed.stdout and "| --- | ---: |" in printed.stdout
    assert all(f"| {' | '.join(row)} |" in printed.stdout for row in table.rows)
    assert table.remarks == summary(swept[1])
    for line in table.remarks:
        assert line in drawn.stdout and line in printed.stdout
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
