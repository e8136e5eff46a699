"""Sweeps on made-up times: what is measured, kept and found again, and what they lead to."""

import dataclasses
import multiprocessing
import os
import signal
from collections import Counter

import pytest
from auxhead.autotune.measuring.timers import FINAL_ROUNDS
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.config_text import text
from auxhead.autotune.sweep.measure import Sweep
from auxhead.autotune.sweep.search import STRATEGIES
from auxhead.autotune.sweep.space import spread_out
from auxhead.autotune.sweep.winners import recorded_winners
from auxhead.kernels.launch.head_shape import HeadShape
from support.sweep_fakes import Synthetic, asking, fails_at, in_two_steps, records_at, run, small_target, true_us

TARGET = small_target()
CANDIDATES = spread_out(TARGET.shape, 8)


def test_what_is_recorded(tmp_path):
    out = tmp_path / "records.jsonl"
    run(asking(CANDIDATES[0]), records_at(out))
    rule, other = read_records(out)
    assert (rule.variant, other.variant) == (text(TARGET.rule), text(CANDIDATES[0])) and rule.run == other.run != ""
    assert other.kind == "sweep" and HeadShape(**other.cell) == TARGET.shape, "of any network"
    assert other.protocol["config"] == dataclasses.asdict(CANDIDATES[0]) and other.protocol["place"] == "alone"
    assert other.protocol["kernel"] == "0123456789abcdef"
    assert other.environment["sm_count"] == 132
    (pair,) = other.paired
    assert pair["role"] == "rule" and pair["samples"] == rule.device_us["samples"]
    truth = [true_us(TARGET, config) for config in (CANDIDATES[0], TARGET.rule)]
    assert pair["device_ratio"] == pytest.approx(truth[0] / truth[1], rel=0.03)
    samples = other.device_us["samples"]
    assert len(samples) == 5 and all(len(rounds) == 4 for rounds in samples)
    assert all(us == round(us, 3) for rounds in samples for us in rounds)
    assert other.device_us["p20"] <= other.device_us["median"] <= other.device_us["p80"]


def assert_go_on_to_the_end(shares):
    assert shares == sorted(shares) and shares[0] == 0.0 and shares[-1] == pytest.approx(1.0)
    assert any(0.3 < share < 0.7 for share in shares)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_progress_is_told(strategy):
    seen = []
    Sweep(Synthetic(), STRATEGIES[strategy], records_at(None), seen.append).run([TARGET, small_target(columns=25)])
    assert_go_on_to_the_end([status.done for status in seen])
    assert "of the rule's time" in " ".join(status.best for status in seen)
    assert seen[0].doing.startswith("resnet18 float16, batch 8, layer1: ")


def test_one_more_configuration_is_one_more_measured(tmp_path):
    out = tmp_path / "records.jsonl"
    (before,), _, _ = run(asking(*CANDIDATES[:3]), records_at(out))
    kept = out.read_bytes()
    (again,), measurer, _ = run(asking(*CANDIDATES[:3]), records_at(out))
    assert not measurer.prepared and again == before and out.read_bytes() == kept
    _, measurer, _ = run(asking(*CANDIDATES[:4]), records_at(out))
    assert measurer.timed == [(text(TARGET.rule), 4), (text(CANDIDATES[3]), 4)], "and its baseline"
    assert [record.variant for record in read_records(out)][4:] == [text(CANDIDATES[3])]
    _, measurer, _ = run(asking(CANDIDATES[0], rounds=3), records_at(out))
    assert not measurer.timed, "more rounds than asked for are enough"
    _, measurer, _ = run(asking(CANDIDATES[0], rounds=5), records_at(out))
    assert len(measurer.timed) == 2, "fewer are not"
    _, measurer, _ = run(asking(CANDIDATES[0], captures=6), records_at(out))
    assert len(measurer.timed) == 2, "nor are fewer captures"


KEYS = [
    *({"environment": {name: "other"}} for name in ("gpu", "sm_count", "driver", "torch", "triton", "cudnn", "cuda")),
    {"protocol": {"kernel": "other"}},
]


def test_what_was_measured_elsewhere_is_measured_again(tmp_path):
    out = tmp_path / "records.jsonl"
    run(asking(), records_at(out))
    for changes in KEYS:
        _, measurer, _ = run(asking(), records_at(out, **changes))
        assert measurer.timed, changes
    _, measurer, _ = run(asking(), records_at(out, environment={"commit": "d", "python": "3"}))
    assert not measurer.timed, "the commit says nothing that the kernels' hash does not"


def test_other_heads_are_measured_for_themselves(tmp_path):
    out = tmp_path / "records.jsonl"
    run(asking(), records_at(out))
    others = [small_target(samples=9), small_target(classes=11)]
    others += [
        TARGET._replace(shape=TARGET.shape._replace(**it)) for it in ({"dtype": "bfloat16"}, {"layout": "strided"})
    ]
    for target in others:
        _, measurer, _ = run(asking(), records_at(out), targets=[target])
        assert measurer.timed, target
    for target in (small_target(model="resnet50"), small_target(taps=("layer2",))):
        _, measurer, _ = run(asking(), records_at(out), targets=[target])
        assert not measurer.timed, "the same head in another network"


def test_what_was_measured_in_a_network_is_passed_over(tmp_path):
    """By earlier versions, into the same files."""
    out = tmp_path / "records.jsonl"
    run(asking(CANDIDATES[0]), records_at(out, protocol={"place": "network"}))
    (found,), measurer, _ = run(asking(CANDIDATES[0]), records_at(out))
    assert len(measurer.timed) == 2
    assert recorded_winners(read_records(out))[0][1] == [found]


def test_what_was_measured_beside_another_rule_is_measured_again(monkeypatch, tmp_path):
    out = tmp_path / "records.jsonl"
    run(asking(CANDIDATES[0]), records_at(out))
    monkeypatch.setattr("auxhead.autotune.measuring.heads_alone.chosen_by_rule", lambda shape: CANDIDATES[1])
    _, measurer, _ = run(asking(CANDIDATES[0]), records_at(out))
    assert len(measurer.timed) == 2


@pytest.mark.parametrize("step", ["prepare", "time"])
def test_failures_are_recorded_with_their_reason(step, tmp_path):
    out = tmp_path / "records.jsonl"
    bad = CANDIDATES[1]
    measurer = Synthetic(fails=fails_at(step, bad))
    (found,), _, sweep = run(asking(*CANDIDATES[:3]), records_at(out), measurer)
    assert sweep.failures == Counter({"out of resources": 1}) and found.config is not None
    records = {record.variant: record for record in read_records(out)}
    assert len(records) == 4 and records[text(bad)].error == f"out of resources: shared memory at {step}: 3 > 2"
    assert [record.error for record in records.values()].count(None) == 3
    if step != "time":
        assert text(bad) not in {config for config, _ in measurer.timed}
    _, measurer, again = run(asking(*CANDIDATES[:3]), records_at(out))
    assert not measurer.prepared and again.failures == sweep.failures, "it would fail again"


def test_without_a_baseline_nothing_is_timed(tmp_path):
    out = tmp_path / "records.jsonl"
    measurer = Synthetic(fails=fails_at("prepare", TARGET.rule))
    (found,), _, sweep = run(STRATEGIES["quick"], records_at(out), measurer)
    assert found.config is found.over_rule is None and not measurer.timed
    assert [record.variant for record in read_records(out)] == [text(TARGET.rule)], "the others did not fail"
    assert sweep.failures == {"out of resources": 1, "no baseline": 13}


class Killed(Synthetic):
    def time(self, target, configs, rounds, captures):
        if captures == 6 and target.taps == ("layer2",):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().time(target, configs, rounds, captures)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_sweep_loses_nothing_and_goes_on(tmp_path):
    out = tmp_path / "records.jsonl"
    first, second = small_target(), small_target(columns=196, taps=("layer2",))
    sweep = Sweep(Killed(), in_two_steps, records_at(out))
    process = multiprocessing.get_context("fork").Process(target=sweep.run, args=([first, second],))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = read_records(out)
    steps = [(record.cell["width"], record.protocol["captures"]) for record in finished]
    assert Counter(steps) == {(first.shape.width, 5): 4, (first.shape.width, 6): 3, (second.shape.width, 5): 4}
    whole = out.read_bytes()
    out.write_bytes(whole[:-100])  # and a line that was being written
    outcomes, measurer, _ = run(in_two_steps, records_at(out), targets=[first, second])
    assert all(found.config is not None for found in outcomes)
    assert len(measurer.timed) == 2 + 3, "what was cut off, beside the rule's, and the second head's second step"
    assert out.read_bytes().startswith(whole[: whole[:-100].rfind(b"\n") + 1])


def test_quick_finds_what_is_better_than_the_rule():
    (found,), measurer, _ = run(STRATEGIES["quick"], records_at(None))
    ratio = true_us(TARGET, found.config) / true_us(TARGET, TARGET.rule)
    assert ratio < 0.95 and found.over_rule.median_ratio == pytest.approx(ratio, rel=0.02)
    steps, further = divmod(len(measurer.timed) - 14 - 7, 13)
    assert 2 <= steps <= 7 and not further, "each time beside the rule's"
    last = [config for config, rounds in measurer.timed if rounds == FINAL_ROUNDS]
    assert len(last) == 7 and {text(TARGET.rule), text(found.config)} <= {*last}


def test_a_head_that_has_one_configuration():
    target = small_target(samples=1, channels=1, columns=1, classes=2)
    (found,), _, _ = run(STRATEGIES["quick"], records_at(None), targets=[target])
    assert found.config is not None
