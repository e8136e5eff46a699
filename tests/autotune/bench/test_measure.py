"""The benchmark without a GPU: what it builds, checks, records and skips; only clock and graphs are fakes."""

import copy
import dataclasses

import pytest
import torch
from auxhead.autotune.bench.measure import paired_with
from auxhead.autotune.bench.run import chosen_variants, unsettled
from auxhead.autotune.bench.tables import bench_tables
from auxhead.autotune.bench.variants import BuiltVariant, Variant, VariantCaptures, catalogue
from auxhead.autotune.measuring.cells import NEVER, SHARES, resnet_cell
from auxhead.autotune.measuring.eager_truth import Comparison, wrong_in_words
from auxhead.autotune.measuring.failures import DeviceLost
from auxhead.autotune.measuring.peers import NaiveHead
from auxhead.autotune.measuring.subject import Subject
from auxhead.autotune.measuring.timers import VariantFailed
from auxhead.autotune.records.record import read_records
from auxhead.autotune.records.zoo import DEFAULT
from auxhead.model import EagerRunner
from auxhead.model.trunk.trunk import make_trunk
from support.bench_fakes import (
    AutoRunner,
    Runner,
    bench,
    faked_plan,
    run,
    small_subject,
    variants,
)
from support.example_models import SmallNet
from support.pretended_gpu import ENVIRONMENT


@pytest.fixture
def subject(without_interpreter):
    return small_subject()


@pytest.fixture
def plan(tmp_path, monkeypatch):
    return faked_plan(tmp_path / "records.jsonl", monkeypatch)


@pytest.fixture
def mixed_subject(subject):
    """The same network in a cell in which samples of one batch leave at several exits: 40 of them."""
    cell = dataclasses.replace(subject.cell, placement="inner-stages")
    return Subject(cell, subject.network, tuple(torch.randn(4, 3, 16, 16) for _ in range(10)))


def changed(plan, **changes):
    return dataclasses.replace(plan, **changes)


def test_a_cell_from_end_to_end(subject, plan):
    before = [(head.rule.threshold, head.rule.enabled) for head in subject.heads]
    records = run(subject, plan)
    measured = {(one.exits, one.variant): one for one in records if one.error is None}
    failed = {(one.exits, one.variant): one.error for one in records if one.error is not None}
    eager = {"eager-naive-item", "eager", "eager-stop"}
    never = {
        *eager,
        "eager-bare",
        "eager-heads-naive",
        "eager-heads-fused",
        "eager-naive",
        "graph-bare",
        "graph-naive",
        "graph-fused",
        "overlapped",
    }
    assert {name for exits, name in measured if exits == "never"} == {f"{name}@as_is" for name in never}
    early = {f"{name}@as_is" for name in (*eager, "graph-bare", "truncated", "overlapped")}
    assert {name for pattern, name in measured if pattern == "block1"} == early
    # what does not run here (a side stream on the CPU) is a record, and the rest went on
    assert set(failed) == {("never", "graph-naive-forked@as_is")}
    early = early - {"truncated@as_is"}
    assert {name for pattern, name in measured if pattern == "own"} == early

    one = measured["block1", "overlapped@as_is"]
    assert one.cell == {
        "model": "tests:small", "dtype": "float32", "batch": 4, "classes": 5, "placement": "own",
        "taps": ["block0", "block1", "block2"], "input": [3, 16, 16],
    }  # fmt: skip
    assert one.protocol["captures"] == 5 and len(one.device_us["captures"]) == 5
    assert one.host_us == {
        "median": 34.0, "p20": 33.0, "p80": 35.0, "captures": [32.0, 33.0, 34.0, 35.0, 36.0], "p99": 36.0,
    }  # fmt: skip
    assert one.protocol["requests"] == 20 and "p99" not in one.device_us, "of single requests, not of means of several"
    assert [(pair["role"], pair["device_ratio"]) for pair in one.paired] == [("bare", 1.0), ("truncated", 16 / 15)]
    assert one.correctness["samples"] == 5 * 4 * 4 and one.correctness["differing"] == 0
    assert one.environment["gpu"] == "H200" and one.environment["commit"] == "c"
    assert len({record.run for record in records}) == 3  # one interleaved run for each exit pattern
    assert [(head.rule.threshold, head.rule.enabled) for head in subject.heads] == before
    assert Runner.open == 0


def test_what_chooses_its_trunk_is_compared_on_that(subject):
    """As all others are: rounding differs from trunk to trunk, and each trunk is checked as it is made."""
    other = copy.deepcopy(subject.network.backbone)
    other.fc.weight.data.neg_()
    trunk = dataclasses.replace(make_trunk(other, subject.network.taps, subject.example), notes=("chosen",))
    captures, (variant,) = VariantCaptures(subject), [one for one in catalogue(subject.cell) if one.name == DEFAULT]
    call = EagerRunner(subject.network, trunk=trunk)
    for chosen, is_right in ((trunk, True), (None, False)):
        comparison, built = Comparison(), BuiltVariant(call, trunk=chosen)
        with subject.exits(NEVER):
            captures.truth_of(variant, built).compare(built.answer_to, comparison)
        assert (wrong_in_words(comparison.counts()) is None) == is_right


def test_auto_is_made_anew_for_every_exit_pattern_by_the_rules_of_that_pattern(subject, plan):
    own = tuple(head.rule.threshold for head in subject.heads)
    records = run(subject, changed(plan, wanted=("auto@as_is",)))
    patterns = [(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), own]
    assert AutoRunner.rules == [rules for rules in patterns for _ in range(2)]  # two captures each
    assert Runner.open == 0 and not [one.error for one in records if one.error]
    measured = {(one.exits, one.variant): one for one in records}
    assert {name for exits, name in measured if exits == "own"} == {
        "graph-bare@as_is", "overlapped@as_is", "auto@as_is",
    }  # fmt: skip
    auto = measured["block1", "auto@as_is"]
    assert auto.notes[:2] == [f"capture {i}: Batch 4: polled, {i + 2} us to the answer." for i in (1, 2)]
    assert auto.protocol["captures"] == 2
    plain = auto.paired[-1]
    assert (plain["role"], plain["variant"], plain["device_ratio"]) == ("plain", "overlapped@as_is", 10 / 16)
    assert not [pair for pair in measured["block1", "overlapped@as_is"].paired if pair["role"] == "plain"]
    (table,) = bench_tables(records)
    remark = "auto@as_is, exits block1: time over that of overlapped@as_is: 0.603 to the answer, 0.625 on the device"
    assert remark in table.remarks


def test_samples_of_one_batch_leave_at_several_exits(mixed_subject, plan):
    records = run(mixed_subject, changed(plan, wanted=("polled-compact@as_is", "overlapped@as_is"), exits=()))
    assert not [one.error for one in records if one.error]
    by_pattern = {pattern: {one.variant for one in records if one.exits == pattern} for pattern in (SHARES, "block1")}
    assert by_pattern == {
        SHARES: {"graph-bare@as_is", "overlapped@as_is", "polled-compact@as_is"},
        "block1": {"graph-bare@as_is", "overlapped@as_is", "truncated@as_is"},
    }
    assert {one.exits for one in records if one.variant == "polled-compact@as_is"} == {NEVER, SHARES}
    for one in records:
        exits = {NEVER: [0, 0, 0, 40], SHARES: [16, 12, 8, 4]}.get(one.exits)
        exits = exits or [40 * (tap == one.exits) for tap in (*SmallNet.taps, "classifier")]
        assert list(one.protocol["samples_by_exit"].items()) == list(
            zip([*SmallNet.taps, "classifier"], exits, strict=True)
        )
        assert one.correctness["differing"] == 0
    compact = next(one for one in records if one.exits == SHARES and one.variant == "polled-compact@as_is")
    assert [pair["role"] for pair in compact.paired] == ["bare"]


def test_resuming_measures_what_is_missing_with_its_baselines(subject, plan):
    first = run(subject, plan)
    assert run(subject, plan) == first  # nothing is left: not even what failed at this commit
    # a process that was killed in the middle of the last pattern
    plan.out.write_bytes(b"".join(plan.out.read_bytes().splitlines(keepends=True)[:-3]))
    assert [one.pattern for _, runs in unsettled([subject.cell], plan) for one in runs] == ["own"]
    again = run(subject, plan)
    assert {(one.exits, one.variant) for one in again} == {(one.exits, one.variant) for one in first}
    assert len({one.run for one in again if one.exits == "own"}) == 2  # measured together once more
    # a failure is tried again at another commit, in the one pattern that it belongs to
    later = changed(plan, environment={**ENVIRONMENT, "commit": "d"})
    assert [one.pattern for _, runs in unsettled([subject.cell], later) for one in runs] == ["never"]
    for other in (
        changed(plan, environment={**ENVIRONMENT, "driver": "590"}), changed(plan, rounds=6), changed(plan, fresh=True)
    ):  # fmt: skip
        assert len(unsettled([subject.cell], other)[0][1]) == 3


def test_a_wrong_variant_is_recorded_and_not_timed(subject, plan, monkeypatch):
    monkeypatch.setattr(Runner, "shift", 1)
    records = run(subject, changed(plan, wanted=("overlapped@as_is",)))
    wrong = [one for one in records if one.variant == "overlapped@as_is"]
    assert len(wrong) == 3 and all(one.host_us is None and one.device_us is None for one in wrong)
    assert "80 of 80 samples" in wrong[0].error and wrong[0].correctness["differing"] == 80
    right = {one.variant for one in records if one.error is None}
    assert right == {"graph-bare@as_is", "truncated@as_is"}
    assert Runner.open == 0


def test_one_wrong_capture_of_five_is_found(subject, plan, monkeypatch):
    made = []

    def stale(function, trunk, context):
        made.append(function)
        if len(made) == 3:  # goes on answering for the input it was captured with
            return BuiltVariant(lambda x: function(context.subject.example))
        return BuiltVariant(function)

    monkeypatch.setattr(variants, "_in_graph", stale)
    records = run(subject, changed(plan, wanted=("graph-bare@as_is",), exits=("never",)))
    assert [one.variant for one in records] == ["graph-bare@as_is"] and records[0].error is not None


def test_wrong_heads_are_found_though_no_sample_leaves_early(subject, plan, monkeypatch):
    class Wrong(NaiveHead):
        def forward(self, x):
            said = super().forward(x)
            return said._replace(label=(said.label + 1) % 5)

    monkeypatch.setattr(variants, "NaiveHead", Wrong)
    only = changed(plan, wanted=("graph-naive@as_is", "graph-fused@as_is"), exits=("never",))
    errors = {one.variant: one.error for one in run(subject, only)}
    assert errors["graph-fused@as_is"] is None and errors["graph-bare@as_is"] is None
    assert errors["graph-naive@as_is"].startswith("answers differ from the eager network's: 120 of 200 samples")


def test_what_raises_while_it_is_timed_fails_alone(subject, plan, monkeypatch):
    timed = bench.time_captures

    def failing(calls, inputs, **rest):
        if rest["rounds"] == 5 and "eager-naive@as_is" in calls:
            raise VariantFailed("eager-naive@as_is") from RuntimeError("late\nfailure")
        return timed(calls, inputs, **rest)

    monkeypatch.setattr(bench, "time_captures", failing)
    records = run(subject, changed(plan, wanted=("eager-*",), exits=("never",)))
    failed = [one for one in records if one.error]
    assert [(one.variant, one.error) for one in failed] == [("eager-naive@as_is", "RuntimeError: late failure")]
    assert len(records) == 7 and all(one.paired[0]["variant"] == "graph-bare@as_is" for one in records if not one.error)


def test_a_trunk_that_does_not_apply_fails_and_is_tried_once_for_each_variant(subject, plan, monkeypatch):
    tried = []

    def no_trunk(*_):
        tried.append(1)
        raise NotImplementedError("no trunk\nhere")

    monkeypatch.setattr(variants, "make_trunk", no_trunk)
    records = run(subject, changed(plan, wanted=("graph-fused@cudnn",)))
    assert [(one.variant, one.error) for one in records] == [
        (f"graph-{what}@cudnn", "NotImplementedError: no trunk here") for what in ("bare", "fused")
    ]
    assert len(tried) == 2


def test_a_lost_device_ends_the_run_after_its_record(subject, plan, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(bench, "release_memory", lost)
    monkeypatch.setattr(Runner, "__call__", lambda self, x: lost())
    with pytest.raises(DeviceLost, match="overlapped@as_is: RuntimeError: CUDA error.*context is lost"):
        run(subject, changed(plan, wanted=("overlapped@as_is",)))
    (record,) = read_records(plan.out)
    assert record.variant == "overlapped@as_is" and "illegal memory access" in record.error


# What is chosen, and compared.


def test_chosen_variants_bring_their_baselines():
    cell = resnet_cell("resnet18", "float16", 8, 10, "stages")
    names = [variant.name for variant in chosen_variants(cell, "layer2", ["polled@cudnn"])]
    assert names == ["graph-bare@cudnn", "truncated@cudnn", "polled@cudnn"]
    assert chosen_variants(cell, "layer2", ["compile-*"]) == []
    everything = [variant.name for variant in chosen_variants(cell, "never", [])]
    assert "compile-naive-reduce-overhead@as_is" in everything and "gated@cudnn" in everything
    assert not [name for name in everything if "max-autotune" in name or name.endswith("@inductor")]
    names = [variant.name for variant in catalogue(resnet_cell("resnet18", "float16", 32, 10, "stages"))]
    assert "compile-bare-max-autotune@as_is" in names and len(set(names)) == len(names)


def test_ratios_are_to_the_same_trunk_of_the_same_run():
    def times(host, device):
        return {"median": host}, {"median": device}

    timed = {
        "graph-bare@cudnn": times(200.0, 190.0), "truncated@cudnn": times(70.0, 60.0),
        "graph-bare@as_is": times(300.0, 290.0), "polled@cudnn": times(75.0, 66.0),
    }  # fmt: skip
    polled = Variant("polled@cudnn", lambda *_: None, "cudnn")
    bare, floor = paired_with(polled, timed)
    assert bare == {
        "role": "bare", "variant": "graph-bare@cudnn", "host_us": 200.0, "host_ratio": 75 / 200, "device_us": 190.0,
        "device_ratio": 66 / 190,
    }  # fmt: skip
    assert floor["variant"] == "truncated@cudnn" and floor["host_us"] == 70.0
    assert paired_with(polled, {"polled@cudnn": times(1.0, 1.0)}) == []
