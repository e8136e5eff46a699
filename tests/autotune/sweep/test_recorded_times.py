"""Sweeps that are answered by records instead of a GPU."""

from collections import Counter

import pytest
from auxhead.autotune.measuring.failures import Failure
from auxhead.autotune.measuring.targets import ALONE
from auxhead.autotune.records.comparison import Paired
from auxhead.autotune.records.record import append_record, read_records
from auxhead.autotune.sweep.config_text import text
from auxhead.autotune.sweep.records import UNAVAILABLE, RecordedTimes, recorded_targets
from auxhead.autotune.sweep.search import STRATEGIES
from auxhead.autotune.sweep.space import spread_out
from support.sweep_fakes import Synthetic, asking, fails_at, records_at, run, small_target

TARGET = small_target()
CANDIDATES = spread_out(TARGET.shape, 8)


@pytest.mark.parametrize("effort", STRATEGIES)
def test_replay_answers_as_was_measured(effort, tmp_path):
    out = tmp_path / "records.jsonl"
    targets = [TARGET, small_target(columns=25, taps=("layer2", "layer3"))]
    measured, _, _ = run(STRATEGIES[effort], records_at(out), targets=targets)
    records = read_records(out)
    assert set(recorded_targets(records, "resnet18")) == set(targets) and recorded_targets(records, "resnet50") == []
    replayed, _, sweep = run(STRATEGIES[effort], records_at(None), RecordedTimes(records), targets)
    assert replayed == measured and not sweep.failures


def test_replay_without_some_records(tmp_path):
    out = tmp_path / "records.jsonl"
    run(asking(*CANDIDATES[:2], rounds=4), records_at(out), Synthetic(fails=fails_at("check", CANDIDATES[1])))
    measurer = RecordedTimes(read_records(out))
    (found,), _, _ = run(asking(*CANDIDATES[:4], rounds=20), records_at(None), measurer)
    assert found.failures == Counter({UNAVAILABLE: 2, "out of resources": 1}) and found.alone is not None
    missing = measurer.time(TARGET, ALONE, [CANDIDATES[3]], 1, 1)[CANDIDATES[3]]
    assert isinstance(missing, Failure) and str(missing) == f"not recorded: {text(CANDIDATES[3])}, alone"
    there = measurer.time(TARGET, ALONE, [CANDIDATES[0]], 1, 1)[CANDIDATES[0]]
    assert isinstance(there, Paired) and len(there.own[0]) == 4, "the rounds there are"


def test_replay_takes_the_last_of_equal_records(tmp_path):
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    run(asking(), records_at(first), Synthetic(1))
    run(asking(), records_at(second), Synthetic(2))
    (newer,) = read_records(second)
    append_record(first, newer)
    measurer = RecordedTimes(read_records(first))
    assert measurer.time(TARGET, ALONE, [TARGET.rule], 4, 5)[TARGET.rule].own == newer.device_us["samples"]
