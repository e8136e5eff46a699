"""The benchmark without a GPU: what it chooses, checks, records, skips, prints; only clock and graphs are fakes."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.__main__ import app
from auxhead.autotune.bench import DeviceLost, paired_with, run_cell
from auxhead.autotune.cells import NEVER, SHARES, Cell, chosen_cells, core_matrix, resnet_cell
from auxhead.autotune.correctness import Answer, Comparison, Rounding, Truth, eager_truth, measure_rounding, verdict
from auxhead.autotune.peers import Compiled, HeadSaid, NaiveHead, Said, bare, in_line, merged, with_item
from auxhead.autotune.plan import Plan, chosen_variants, units_of, unsettled
from auxhead.autotune.record import append_record, read_records
from auxhead.autotune.subject import Subject, build_subject, subject_of, thresholds_of_shares
from auxhead.autotune.tables import COLUMNS, as_markdown, bench_tables
from auxhead.autotune.timing import Samples, VariantFailed
from auxhead.autotune.variants import Capture, Factories, Variant, catalogue, smaller_sizes
from auxhead.model import EagerRunner, EarlyExitNetwork, FusedAuxHead, make_trunk
from example_models import SmallNet, plain_heads
from simulated_cuda import simulated_cuda
from typer.testing import CliRunner

bench = importlib.import_module("auxhead.autotune.bench")
segments = importlib.import_module("auxhead.autotune.segments")
variants = importlib.import_module("auxhead.autotune.variants")
ENVIRONMENT = {
    "gpu": "H200",
    "driver": "580",
    "torch": "2.11",
    "triton": "3.6",
    "cudnn": 1,
    "cuda": "13",
    "commit": "c",
}
#: What runs on the CPU.
WANTED = ("eager*", "graph-*@as_is", "overlapped@as_is")


@pytest.fixture
def subject(without_interpreter):
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), plain_heads(), example_input=torch.randn(2, 3, 16, 16)).eval()
    return subject_of("tests:small", network, torch.randn(4, 3, 16, 16))


@pytest.fixture
def mixed_subject(subject):
    """The same network in a cell in which samples of one batch leave at several exits: 40 of them."""
    cell = dataclasses.replace(subject.cell, placement="inner-stages")
    return Subject(cell, subject.network, tuple(torch.randn(4, 3, 16, 16) for _ in range(10)))


class Runner(EagerRunner):
    """The eager runner under another one's name; counts how many are open."""

    open = 0
    shift = 0

    def __init__(self, network):
        super().__init__(network)
        Runner.open += 1

    def __call__(self, x):
        result = super().__call__(x)
        return result._replace(label=(result.label + Runner.shift) % 5)

    def close(self):
        Runner.open -= 1


class AutoRunner(Runner):
    """Remembers the rules that were in force when each was made."""

    rules = []

    def __init__(self, network):
        super().__init__(network)
        AutoRunner.rules.append(tuple(head.rule.threshold for head in network.heads))

    def describe(self):
        return f"Batch 4: polled, {len(AutoRunner.rules)} us to the answer.\nThe backbone runs as it is."


def make_runner(network, example_input, *, exits, batch_sizes, trunk, lag=0, compact=False):
    assert batch_sizes == ((1, 2, 3, 4) if compact else (4,)) and trunk == "as_is"
    assert len(example_input) == (16 if exits == "auto" else 4)  # auto chooses by all inputs
    return (AutoRunner if exits == "auto" else Runner)(network)


class EagerSegments:
    """The segments of a trunk for one batch size, which say when they are launched and run when they have to answer."""

    launched = []

    def __init__(self, trunk, taps, example):
        self.answer = lambda x: merged(bare(trunk, taps, x))
        size = len(example)
        self.graphs = [Launched(size, place) for place in range(len(taps) + 1)]


class Launched:
    def __init__(self, size, place):
        self.launch = lambda _stream: EagerSegments.launched.append((place, size))


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Graphs are called eagerly, and a variant takes as many microseconds as its name has letters."""

    def time_captures(calls, inputs, *, rounds, warm_up, repeat):
        return {
            name: Samples(
                device=[[float(len(name))] * rounds for _ in captures],
                host=[[2.0 * len(name) + place] * rounds for place, _ in enumerate(captures)],
            )
            for name, captures in calls.items()
        }

    monkeypatch.setattr(bench, "time_captures", time_captures)
    monkeypatch.setattr(variants, "_in_graph", lambda function, trunk, workshop: Capture(function, merged))
    monkeypatch.setattr(segments, "SegmentGraphs", EagerSegments)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(Runner, "open", 0)
    monkeypatch.setattr(Runner, "shift", 0)
    monkeypatch.setattr(AutoRunner, "rules", [])
    return Plan(tmp_path / "records.jsonl", ENVIRONMENT, 5, WANTED, factories=Factories(make_runner, None))


def changed(plan, **changes):
    return dataclasses.replace(plan, **changes)


def run(subject, plan):
    for _, units in unsettled([subject.cell], plan):
        run_cell(subject, units, plan)
    return read_records(plan.out) if plan.out.exists() else []


def test_a_cell_from_end_to_end(subject, plan):
    before = [(head.rule.threshold, head.rule.enabled) for head in subject.heads]
    records = run(subject, plan)
    measured = {(one.exits, one.variant): one for one in records if one.error is None}
    failed = {(one.exits, one.variant): one.error for one in records if one.error is not None}
    never = {"eager-bare", "eager-naive", "eager-naive-item", "graph-bare", "graph-naive", "graph-fused", "overlapped"}
    assert {name for exits, name in measured if exits == "never"} == {f"{name}@as_is" for name in (*never, "eager")}
    early = {f"{name}@as_is" for name in ("graph-bare", "truncated", "eager-naive-item", "overlapped", "eager")}
    for exits in ("block0", "block1", "block2"):
        assert {name for pattern, name in measured if pattern == exits} == early
    # what does not run here (a side stream on the CPU) is a record, and the rest went on
    assert set(failed) == {("never", "graph-naive-forked@as_is")}
    early = early - {"truncated@as_is"} | {"segments-floor@as_is"}
    assert {name for pattern, name in measured if pattern == "own"} == early

    one = measured["block1", "overlapped@as_is"]
    assert one.cell == {
        "model": "tests:small", "dtype": "float32", "batch": 4, "classes": 5, "placement": "own",
        "taps": ["block0", "block1", "block2"], "input": [3, 16, 16],
    }  # fmt: skip
    assert one.protocol["captures"] == 5 and len(one.device_us["captures"]) == 5
    assert one.host_us == {"median": 34.0, "p20": 33.0, "p80": 35.0, "captures": [32.0, 33.0, 34.0, 35.0, 36.0]}
    assert [(pair["role"], pair["device_ratio"]) for pair in one.paired] == [("bare", 1.0), ("truncated", 16 / 15)]
    assert one.correctness["samples"] == 5 * 4 * 4 and one.correctness["differing"] == 0
    assert one.environment["gpu"] == "H200" and one.environment["commit"] == "c"
    assert len({record.run for record in records}) == 5  # one interleaved run for each exit pattern
    assert [(head.rule.threshold, head.rule.enabled) for head in subject.heads] == before
    assert Runner.open == 0


def test_auto_is_made_anew_for_every_exit_pattern_by_the_rules_of_that_pattern(subject, plan):
    own = tuple(head.rule.threshold for head in subject.heads)
    records = run(subject, changed(plan, wanted=("auto@as_is",)))
    patterns = [(1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), own]
    assert AutoRunner.rules == [rules for rules in patterns for _ in range(2)]  # two captures each
    assert Runner.open == 0 and not [one.error for one in records if one.error]
    measured = {(one.exits, one.variant): one for one in records}
    assert {name for exits, name in measured if exits == "own"} == {
        "graph-bare@as_is", "segments-floor@as_is", "overlapped@as_is", "auto@as_is",
    }  # fmt: skip
    auto = measured["block1", "auto@as_is"]
    assert auto.notes[:2] == [f"capture {i}: Batch 4: polled, {i + 4} us to the answer." for i in (1, 2)]
    assert auto.protocol["captures"] == 2
    plain = auto.paired[-1]
    assert (plain["role"], plain["variant"], plain["device_ratio"]) == ("plain", "overlapped@as_is", 10 / 16)
    assert not [pair for pair in measured["block1", "overlapped@as_is"].paired if pair["role"] == "plain"]
    (table,) = bench_tables(records)
    remark = "auto@as_is, exits block1: time over that of overlapped@as_is: 0.603 to the answer, 0.625 on the device"
    assert remark in table.remarks


def test_samples_of_one_batch_leave_at_several_exits(mixed_subject, plan):
    records = run(mixed_subject, changed(plan, wanted=("polled-compact@as_is", "overlapped@as_is")))
    assert not [one.error for one in records if one.error]
    by_pattern = {pattern: {one.variant for one in records if one.exits == pattern} for pattern in (SHARES, "block1")}
    assert by_pattern == {
        SHARES: {"graph-bare@as_is", "segments-floor@as_is", "overlapped@as_is", "polled-compact@as_is"},
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
    floor = next(one for one in records if one.variant == "segments-floor@as_is")
    assert "no heads" in floor.notes[0] and floor.correctness["samples"] == 5 * 10 * 4
    compact = next(one for one in records if one.exits == SHARES and one.variant == "polled-compact@as_is")
    assert [pair["role"] for pair in compact.paired] == ["bare", "segments"]


def test_the_floor_launches_each_segment_for_the_samples_that_are_open(mixed_subject, plan, monkeypatch):
    network, inputs = mixed_subject.network, mixed_subject.inputs[:3]
    trunk = make_trunk(network.backbone, network.taps, inputs[0])
    exits = [torch.tensor(one) for one in ([0, 3, 1, 0], [0, 0, 0, 0], [3, 3, 3, 3])]
    floor = segments.SegmentsFloor(trunk, network.taps, inputs, exits, (1, 3, 4))
    launched = []
    for x in inputs:
        monkeypatch.setattr(EagerSegments, "launched", [])
        assert floor(x) is x
        launched.append(EagerSegments.launched)
    # two samples are open in the second segment of the first, and no size 2 may be captured
    assert launched == [[(0, 4), (1, 3), (2, 1), (3, 1)], [(0, 4)], [(0, 4), (1, 4), (2, 4), (3, 4)]]


@pytest.mark.parametrize("kind", ["as_is", "cudnn"])
def test_every_captured_size_of_the_floor_is_checked(kind, mixed_subject):
    network, inputs = mixed_subject.network, mixed_subject.inputs[:2]
    trunk = make_trunk(network.backbone, network.taps, inputs[0], kind)
    exits = [torch.tensor([0, 3, 1, 0]), torch.tensor([3, 1, 1, 1])]
    rounding = measure_rounding(network, inputs)
    with mixed_subject.exits(NEVER), torch.no_grad():
        truths = [eager_truth(network.logits(x), mixed_subject.heads, rounding) for x in inputs]
    with simulated_cuda():
        floor = segments.SegmentsFloor(trunk, network.taps, inputs, exits, (1, 2, 4))
        comparison = Comparison()
        for x, truth in zip(inputs, truths, strict=True):
            comparison.add(floor.answer(floor(x)), truth)
        assert verdict(comparison.counts()) is None
        of_two = floor._captured[2]
        floor._captured[2] = SimpleNamespace(answer=lambda _x: of_two.answer(inputs[1][2:]))
        comparison.add(floor.answer(inputs[0]), truths[0])
    assert verdict(comparison.counts()) is not None


def test_resuming_measures_what_is_missing_with_its_baselines(subject, plan):
    first = run(subject, plan)
    assert run(subject, plan) == first  # nothing is left: not even what failed at this commit
    # a process that was killed in the middle of the last pattern
    plan.out.write_bytes(b"".join(plan.out.read_bytes().splitlines(keepends=True)[:-3]))
    assert [unit.pattern for _, units in unsettled([subject.cell], plan) for unit in units] == ["own"]
    again = run(subject, plan)
    assert {(one.exits, one.variant) for one in again} == {(one.exits, one.variant) for one in first}
    assert len({one.run for one in again if one.exits == "own"}) == 2  # measured together once more
    # a failure is tried again at another commit, in the one pattern that it belongs to
    later = changed(plan, environment={**ENVIRONMENT, "commit": "d"})
    assert [unit.pattern for _, units in unsettled([subject.cell], later) for unit in units] == ["never"]
    for other in (
        changed(plan, environment={**ENVIRONMENT, "driver": "590"}), changed(plan, rounds=6), changed(plan, fresh=True)
    ):  # fmt: skip
        assert len(unsettled([subject.cell], other)[0][1]) == 5


def test_what_failed_is_left_out_of_a_resumed_run(subject, plan):
    records = run(subject, plan)
    kept = [one for one in records if one.variant not in ("eager-bare@as_is",)]
    plan.out.unlink()
    for one in kept:
        append_record(plan.out, one)
    ((_, (unit,)),) = unsettled([subject.cell], plan)
    assert unit.pattern == "never" and "graph-naive-forked@as_is" not in [variant.name for variant in unit.variants]


def test_a_wrong_variant_is_recorded_and_not_timed(subject, plan, monkeypatch):
    monkeypatch.setattr(Runner, "shift", 1)
    records = run(subject, changed(plan, wanted=("overlapped@as_is",)))
    wrong = [one for one in records if one.variant == "overlapped@as_is"]
    assert len(wrong) == 5 and all(one.host_us is None and one.device_us is None for one in wrong)
    assert "80 of 80 samples" in wrong[0].error and wrong[0].correctness["differing"] == 80
    right = {one.variant for one in records if one.error is None}
    assert right == {"graph-bare@as_is", "truncated@as_is", "segments-floor@as_is"}
    assert Runner.open == 0


def test_one_wrong_capture_of_five_is_found(subject, plan, monkeypatch):
    made = []

    def stale(function, trunk, workshop):
        made.append(function)
        if len(made) == 3:  # goes on answering for the input it was captured with
            return Capture(lambda x: function(workshop.subject.example), merged)
        return Capture(function, merged)

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
    assert len(records) == 4 and all(one.paired[0]["variant"] == "graph-bare@as_is" for one in records if not one.error)


def test_a_trunk_that_does_not_apply_fails_and_is_tried_once_a_cell(subject, plan):
    tried = []

    def no_trunk(*_):
        tried.append(1)
        raise NotImplementedError("no trunk\nhere")

    factories = Factories(make_runner, no_trunk)
    records = run(subject, changed(plan, wanted=("graph-fused@cudnn",), factories=factories))
    assert [(one.variant, one.error) for one in records] == [
        (f"graph-{what}@cudnn", "NotImplementedError: no trunk here") for what in ("bare", "fused")
    ]
    assert len(tried) == 2  # once for each variant


def test_a_lost_device_ends_the_run_after_its_record(subject, plan, monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(bench, "_free", lost)
    monkeypatch.setattr(Runner, "__call__", lambda self, x: lost())
    with pytest.raises(DeviceLost, match="overlapped@as_is: RuntimeError: CUDA error.*context is lost"):
        run(subject, changed(plan, wanted=("overlapped@as_is",)))
    (record,) = read_records(plan.out)
    assert record.variant == "overlapped@as_is" and "illegal memory access" in record.error


def test_core_matrix():
    cells = core_matrix()
    assert len(cells) == len(set(cells)) == 33
    assert {(cell.batch, cell.classes, cell.placement) for cell in cells[:16]} == {
        (batch, classes, placement) for batch in (1, 8, 32, 128) for classes in (10, 1000)
        for placement in ("blocks", "stages")
    }  # fmt: skip
    assert resnet_cell("resnet18", "float16", 1, 10, "blocks").taps == tuple(
        f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)
    )
    assert resnet_cell("resnet50", "float16", 1, 10, "stages").taps == ("layer1", "layer2", "layer3", "layer4")
    mixed = cells[-1]
    assert (mixed.batch, mixed.classes) == (64, 10) and mixed.taps == ("layer1", "layer2", "layer3")
    assert mixed.patterns == ["never", "layer1", "layer2", "layer3", "40/30/20/10"]
    assert cells[0].patterns == ["never", *cells[0].taps]
    assert smaller_sizes(64) == (8, 16, 24, 32, 40, 48, 64) and smaller_sizes(2) == (1, 2)
    names = {variant.name: variant for variant in catalogue(mixed)}
    assert names["polled-compact@cudnn"].by_default
    for other in (cells[0], dataclasses.replace(mixed, batch=1)):
        assert "polled-compact@cudnn" not in [variant.name for variant in catalogue(other)]


def exits_of(confidence, thresholds):
    """How many samples leave at each head, and how many at none."""
    sure = confidence > torch.tensor(thresholds).double()[:, None]
    first = torch.where(sure.any(0), sure.int().argmax(0), len(thresholds))
    return torch.bincount(first, minlength=len(thresholds) + 1).tolist()


@pytest.mark.parametrize(
    ("samples", "shares", "wanted"),
    [
        (640, (40, 30, 20, 10), [256, 192, 128, 64]),
        (128, (40, 30, 20, 10), [51, 39, 25, 13]),
        (7, (0, 100, 0, 0), [0, 7, 0, 0]),
        (5, (0, 0, 0, 100), [0, 0, 0, 5]),
        (1, (40, 30, 20, 10), [0, 1, 0, 0]),
    ],
)
def test_thresholds_of_shares(samples, shares, wanted):
    confidence = torch.rand(3, samples, dtype=torch.float64) * 0.9 + 0.05
    assert exits_of(confidence, thresholds_of_shares(confidence, shares)) == wanted


def test_samples_of_one_confidence_stay_together():
    confidence = torch.tensor([[0.5] * 6 + [0.9] * 4, [0.3, 0.4, 0.5, 0.6, 0.7, 0.8] + [0.2] * 4]).double()
    thresholds = thresholds_of_shares(confidence, (60, 20, 20))
    assert exits_of(confidence, thresholds) == [4, 4, 2]  # at the first head four or ten may leave


def test_chosen_cells():
    assert len(chosen_cells(quick=True)) == 2
    assert {cell.batch for cell in chosen_cells(quick=False, batches=[8], models=["resnet18"])} == {8}
    outside = chosen_cells(quick=False, models=["resnet50"], batches=[8], classes=[10], placements=["stages"])
    assert outside == [resnet_cell("resnet50", "float16", 8, 10, "stages")]
    both = chosen_cells(quick=True, dtypes=["float16", "float32"])
    assert [(cell.dtype, cell.batch) for cell in both] == [
        (dtype, n) for dtype in ("float16", "float32") for n in (1, 8)
    ]


def test_chosen_variants_bring_their_baselines():
    cell = resnet_cell("resnet18", "float16", 8, 10, "stages")
    names = [variant.name for variant in chosen_variants(cell, "layer2", ["polled@cudnn"])]
    assert names == ["graph-bare@cudnn", "truncated@cudnn", "polled@cudnn"]
    assert chosen_variants(cell, "layer2", ["compile-*"]) == []
    everything = [variant.name for variant in chosen_variants(cell, "never", [])]
    assert "compile-naive-reduce-overhead@as_is" in everything and "gated-lag1@cudnn" in everything
    assert not [name for name in everything if "max-autotune" in name or name.endswith("@inductor")]
    names = [variant.name for variant in catalogue(resnet_cell("resnet18", "float16", 32, 10, "stages"))]
    assert "compile-bare-max-autotune@as_is" in names and len(set(names)) == len(names)


@pytest.mark.parametrize("placement", ["blocks", "stages"])
def test_random_networks_answer_differently_for_every_input(placement, without_interpreter):
    taps = resnet_cell("resnet18", "float32", 8, 10, placement).taps
    subject = build_subject(Cell("resnet18", "float32", 8, 10, placement, taps, (3, 48, 48)), torch.device("cpu"))
    again = build_subject(subject.cell, torch.device("cpu"))
    assert torch.equal(subject.example, again.example)
    assert torch.equal(subject.network.backbone.fc.weight, again.network.backbone.fc.weight)
    assert len(subject.inputs) == 2 and subject.example.is_contiguous(memory_format=torch.channels_last)
    rounding = measure_rounding(subject.network, subject.inputs)
    for logits in subject.network.logits(torch.cat(subject.inputs)):
        assert logits.argmax(1).unique().numel() >= 4 and 1.0 < logits.std() < 9.0
    assert max(rounding.logit) < 1e-3
    with subject.exits("layer3.0" if placement == "blocks" else "layer3"):
        assert (subject.network(subject.example).exit_index == (4 if placement == "blocks" else 2)).all()
    with subject.exits("never"):
        assert (subject.network(subject.example).exit_index == len(taps)).all()


def test_shares_hold_in_a_network_of_random_weights(without_interpreter):
    taps = resnet_cell("resnet18", "float32", 8, 10, "inner-stages").taps
    subject = build_subject(Cell("resnet18", "float32", 8, 10, "inner-stages", taps, (3, 48, 48)), torch.device("cpu"))
    assert len(subject.inputs) == 10
    with subject.exits(SHARES):
        exits = torch.cat([subject.network(x).exit_index for x in subject.inputs])
    assert torch.bincount(exits).tolist() == [32, 24, 16, 8]


def test_truth_says_what_lies_within_rounding():
    head = FusedAuxHead(4, 2, rule=0.75)
    logits = torch.tensor([[5.0, 0.0], [1.0986, 0.0], [0.0, 0.0], [0.0, 0.0]])  # 0.993, 0.75, 0.5, 0.5
    last = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.001], [0.0, 1.0]])
    truth = eager_truth([logits, last], [head], Rounding([1e-3, 1e-3], [1e-3, 1e-3]))
    assert truth.answer.label.tolist() == [0, 1, 1, 1] and truth.answer.exit_index.tolist()[0::2] == [0, 1]
    assert truth.near.tolist() == [False, True, True, False]
    assert truth.possible.tolist() == [[True, False], [False, True], [True, True], [False, True]]
    never = FusedAuxHead(4, 2, rule=1.0)  # a confidence close to 1.0 is not near a threshold that nothing exceeds
    sure = torch.tensor([[50.0, 0.0]])
    assert not eager_truth([sure, sure], [never], Rounding([1e-3] * 2, [1e-3] * 2)).near.any()


def test_comparison():
    right = Answer(torch.tensor([1, 2, 3, 0]), torch.full((4,), 0.5).double(), torch.tensor([0, 0, 1, 1]))
    possible = torch.eye(4, dtype=torch.bool)[right.label]
    possible[1, 0] = True  # the second sample's label may be 0 as well, the third may leave elsewhere
    truth = Truth(right, torch.tensor([False, False, True, False]), possible, torch.full((4,), 0.01))

    def counts(**changes):
        comparison = Comparison()
        comparison.add(right, truth)
        comparison.add(right._replace(**changes), truth)
        return comparison.counts()

    fine = counts(label=torch.tensor([1, 0, 3, 0]), exit_index=torch.tensor([0, 0, 0, 1]))
    assert fine == {"samples": 8, "differing": 2, "differing_near": 2, "near": 4, "confidence_off": 0}
    assert verdict(fine) is None
    assert verdict(counts(label=torch.tensor([0, 2, 3, 0]))).startswith("answers differ")
    assert "1 of 8" in verdict(counts(label=torch.tensor([1, 3, 3, 0])))
    assert "1 of 8" in verdict(counts(label=torch.tensor([1, 2, 3, 4])))
    assert "1 of 8" in verdict(counts(exit_index=torch.tensor([0, 0, 1, 0])))
    for wrong in (0.52, float("nan")):
        off = counts(confidence=torch.tensor([0.5, 0.5, 0.5, wrong]).double())
        assert off["confidence_off"] == 1 and verdict(off).startswith("confidences differ")
    assert verdict(Comparison().counts()) == "nothing was compared"
    with pytest.raises(ValueError, match=r"answers for \(3,\) samples"):
        Comparison().add(Answer(*(field[:3] for field in right)), truth)


def test_merging_takes_the_first_sure_head():
    heads = [
        HeadSaid(torch.tensor([1, 1, 1]), torch.tensor([0.9, 0.1, 0.1]), torch.tensor([True, False, False])),
        HeadSaid(torch.tensor([2, 2, 2]), torch.tensor([0.8, 0.8, 0.1]), torch.tensor([True, True, False])),
    ]
    answer = merged(Said(heads, torch.tensor([[9.0, 0.0]] * 3), 2))
    assert answer.label.tolist() == [1, 2, 0] and answer.exit_index.tolist() == [0, 1, 2]


def test_compiled_heads_answer_as_hooked_ones(subject, monkeypatch):
    compiler = torch.compile

    def without_inductor(module, *, mode, dynamic):
        assert mode == "reduce-overhead" and dynamic is False
        return compiler(module, backend="aot_eager", fullgraph=True, dynamic=False)

    monkeypatch.setattr(torch, "compile", without_inductor)
    network, heads = subject.network, [NaiveHead(head) for head in subject.heads]
    bare, compiled = (Compiled(network, some, "reduce-overhead") for some in ([], heads))
    for x in subject.inputs:
        assert not bare(x).heads
        said = compiled(x)
        with torch.no_grad():
            wanted = in_line(make_trunk(network.backbone, network.taps, x), network.taps, heads, x)
        assert len(said.heads) == 3 and torch.allclose(said.last, wanted.last, atol=1e-5, rtol=0.0)
        assert torch.equal(merged(said).label, merged(wanted).label)
        assert torch.allclose(bare(x).last, wanted.last, atol=1e-5, rtol=0.0)
    for module in network.backbone.modules():
        assert not module._forward_hooks  # those that are compiled in are a copy's


def test_compiled_heads_must_not_get_lost(subject, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module, **_: lambda x: ([], module.backbone(x)))
    compiled = Compiled(subject.network, [NaiveHead(head) for head in subject.heads], "reduce-overhead")
    with pytest.raises(RuntimeError, match="left out heads: 0 of 3"):
        compiled(subject.example)


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


def test_tables(subject, plan):
    records = run(subject, plan)
    (table,) = bench_tables(records)
    assert "tests:small float32, batch 4, 5 classes, 3 heads (own), 3x16x16; H200, torch 2.11" in table.title
    exits = [row[0] for row in table.rows]
    assert exits == sorted(exits, key=["never", "block0", "block1", "block2", "own"].index)
    row = next(row for row in table.rows if row[:2] == ("block1", "overlapped@as_is"))
    assert row == (
        "block1",
        "overlapped@as_is",
        "34.0 (33.0-35.0)",
        "16.0 (16.0-16.0)",
        "1.000",
        "1.000",
        "+2.0",
        "+1.0",
        "0.938",
    )
    mixed = next(row for row in table.rows if row[:2] == ("own", "overlapped@as_is"))
    assert mixed[-3:] == ("-8.0", "-4.0", "1.250")  # the floor's times are the letters of "segments-floor@as_is"
    failed = next(row for row in table.rows if row[1] == "graph-naive-forked@as_is")
    assert failed[2] == "failed" and len(failed) == len(COLUMNS) and "graph-naive-forked@as_is" in table.remarks[0]

    printed = CliRunner().invoke(app, ["table", str(plan.out), "--markdown"])
    assert printed.exit_code == 0 and printed.stdout.strip() == as_markdown(table).strip()
    assert "| block1 | overlapped@as_is | 34.0 (33.0-35.0) |" in printed.stdout
    drawn = CliRunner().invoke(app, ["table", str(plan.out)], env={"COLUMNS": "200"})
    assert drawn.exit_code == 0 and "overlapped@as_is" in drawn.stdout and "1.000" in drawn.stdout


def tune(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_one_line_error(result, message):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and message in result.stderr and result.stderr.count("\n") == 1


def test_the_command(subject, plan, monkeypatch, tmp_path):
    command = importlib.import_module("auxhead.autotune.__main__")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200 (fake)")
    monkeypatch.setattr(command, "load_subject", lambda model: subject)
    arguments = (
        "bench",
        "--model",
        "tests:small",
        "--rounds",
        5,
        "--variant",
        "eager-*",
        "--variant",
        "graph-fused@as_is",
    )
    first = tune(*arguments)
    assert first.exit_code == 0, first.output
    assert "1 of 5: tests:small float32" in first.stdout and "5 of 5, about 0 min left:" in first.stdout
    assert "Records: autotune-records/bench-nvidia-h200-fake.jsonl" in first.stdout
    records = read_records(tmp_path / "autotune-records" / "bench-nvidia-h200-fake.jsonl")
    assert {one.variant for one in records if one.exits == "never"} == {
        "eager-bare@as_is", "eager-naive@as_is", "eager-naive-item@as_is", "graph-bare@as_is", "graph-fused@as_is",
    }  # fmt: skip
    some = tune(*arguments, "--exits", "never", "--exits", "*2", "--out", "some.jsonl")
    assert some.exit_code == 0 and {one.exits for one in read_records(tmp_path / "some.jsonl")} == {"never", "block2"}
    second = tune(*arguments)
    assert second.exit_code == 0 and " of 5" not in second.stdout and "Records: " in second.stdout

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(command, "run_cell", no_memory)
    failed = tune(*arguments, "--fresh")
    assert (
        failed.exit_code == 2
        and "1 of 1 cells could not be measured" in failed.stderr
        and "out of memory" in failed.stderr
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device():
    assert_one_line_error(tune("bench", "--quick"), "torch sees no CUDA device here, wants one")


@pytest.fixture
def pretend_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


FACTORIES = """
import torch
from auxhead.model import EarlyExitNetwork
from example_models import SmallNet, plain_heads

def nothing(): pass
def swapped(): return torch.zeros(1), None
def on_cpu(): return EarlyExitNetwork(SmallNet(), plain_heads()).eval(), torch.zeros(2, 3, 16, 16)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet19"], "--model: got resnet19, wants one of resnet18, resnet50 or package.module:function"),
        (["--model", "no_such:thing"], "--model: no module 'no_such'"),
        (["--model", "factories_of_tests:absent"], "which it does not have; wants a function"),
        (["--model", "factories_of_tests:nothing"], "returned (NoneType), wants (EarlyExitNetwork, Tensor)"),
        (["--model", "factories_of_tests:swapped"], "returned (Tensor, NoneType), wants"),
        (["--model", "factories_of_tests:on_cpu"], "returned tensors on cpu; wants"),
        (["--model", "a:b", "--model", "resnet18"], "--model: got 2 of them, wants a factory alone"),
        (["--model", "a:b", "--batch", "8"], "--batch: is that of the network which a:b returns"),
        (["--model", "a:b", "--quick"], "--quick: chooses cells of the core matrix"),
        (["--variant", "poled@*"], "--variant: got poled@*, wants names or globs of: eager-bare@as_is"),
        (["--exits", "layer5"], "--exits: got layer5, wants names or globs of: never, layer1.0"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line_and_status_2(pretend_cuda, tmp_path, monkeypatch, arguments, message):
    (tmp_path / "factories_of_tests.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("factories_of_tests", None)
    assert_one_line_error(tune("bench", *arguments), message)


def test_table_errors(tmp_path):
    assert_one_line_error(tune("table", tmp_path / "absent.jsonl"), "absent.jsonl: no such file")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    assert_one_line_error(tune("table", tmp_path / "bad.jsonl"), "bad.jsonl, line 1: got schema None")


def test_records_of_the_repository_can_be_read():
    for path in (Path(__file__).parent.parent / "autotune" / "records").glob("*.jsonl"):
        records = read_records(path)
        assert records and all(json.dumps(record.cell) for record in records)
    assert units_of(core_matrix()[0], Plan(Path("x"), ENVIRONMENT), [])


def test_what_people_write_leaves_once_every_sample_was_sure_at_some_head():
    def head(*exits):
        return lambda y: HeadSaid(torch.tensor([3, 4]), torch.tensor([0.8, 0.9]), torch.tensor(exits))

    backbone = SmallNet().eval()
    heads = [head(True, False), head(False, True), head(False, False)]
    x = torch.randn(2, 3, 16, 16)
    said = with_item(make_trunk(backbone, SmallNet.taps, x), SmallNet.taps, heads, x)
    assert said.last_exit == 1 and merged(said).exit_index.tolist() == [0, 1]
