"""Accuracy against latency without a GPU: thresholds, checks, means and records, with a clock that is made up."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.bench.variants import BuiltVariant
from auxhead.autotune.measuring.cells import NEVER
from auxhead.autotune.measuring.environment import this_device
from auxhead.autotune.measuring.peers import merged_answer
from auxhead.autotune.measuring.subject import Subject, own_cell
from auxhead.autotune.measuring.timers import Samples, VariantFailed
from auxhead.autotune.pareto.demo_splits import demo_splits
from auxhead.autotune.pareto.measure import LEAST_ROUNDS, OperatingPoint, Pareto, in_turns, mean_time, operating_points
from auxhead.autotune.records.record import read_records
from auxhead.model import EagerRunner, EarlyExitNetwork, save_checkpoint
from auxhead.model.demo.report import REPORT_FORMAT
from auxhead.model.demo.saved import BACKBONE, load_demo
from auxhead.model.demo.small_resnet import small_early_exit_network
from auxhead.model.training.data_sets import Split, load_folder
from PIL import Image
from support.command_line import assert_one_line_error, tune
from support.example_models import SmallNet, needs_gpu, plain_heads
from support.pretended_gpu import compute_on_the_cpu

measuring = importlib.import_module("auxhead.autotune.pareto.measure")
running = importlib.import_module("auxhead.autotune.pareto.run")
variants = importlib.import_module("auxhead.autotune.bench.variants")

pytestmark = pytest.mark.usefixtures("without_interpreter")

#: Microseconds of a round, by variant.
US = {"eager-bare": 1000.0, "graph-bare": 200.0, "overlapped": 220.0, "polled": 100.0, "gated": 90.0}


class Runner(EagerRunner):
    """The eager runner under another one's name."""

    shift = 0

    def __call__(self, x):
        result = super().__call__(x)
        return result._replace(label=(result.label + self.shift) % 5)


@pytest.fixture
def pretended(monkeypatch):
    """Graphs are called eagerly, runners are the eager one, and the clock is ``US``; returns what was called."""
    timed = []

    def make_runner(network, example_input, *, exits, batch_sizes, trunk):
        assert batch_sizes == (len(example_input),)
        return Runner(network)

    def time_captures(calls, inputs, *, rounds, warm_up, repeat):
        timed.append((list(calls), len(inputs)))
        samples = {}
        for name, captures in calls.items():
            own = [
                [US[name.partition("@")[0]]] * len(range(place, rounds, len(captures)))
                for place in range(len(captures))
            ]
            samples[name] = Samples(device=own, host=own, call=own)
        return samples

    monkeypatch.setattr(measuring, "LEAST_ROUNDS", 6)
    monkeypatch.setattr(measuring, "time_captures", time_captures)
    monkeypatch.setattr(variants, "make_runner", make_runner)
    monkeypatch.setattr(variants, "_in_graph", lambda function, trunk, context: BuiltVariant(function, merged_answer))
    monkeypatch.setattr(Runner, "shift", 0)
    return timed


def small_subject(batch=4, count=12, device="cpu"):
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), plain_heads()).eval().to(device)
    network.check_taps(torch.randn(2, 3, 16, 16, device=device))
    x = torch.randn(count, 3, 16, 16).to(device)
    return Subject(own_cell("tests:small", network, x[:batch]), network, x.split(batch)), x


def test_accuracy_is_that_of_the_answers_and_thresholds_are_put_back(pretended):
    subject, x = small_subject()
    labels = torch.randint(5, (10,), generator=torch.Generator().manual_seed(1))  # two of twelve fill the last batch up
    measured = Pareto(subject, labels, "as_is")
    names = ["eager-bare@as_is", "graph-bare@as_is", "overlapped@as_is", "polled@as_is", "gated@as_is"]
    assert [variant.name for variant in measured.variants] == names
    confidence = [logits.softmax(1).amax(1) for logits in subject.network.logits(x)]
    point = OperatingPoint(
        "calibrated 1 %", (confidence[0].quantile(0.5).item(), confidence[1].quantile(0.5).item(), 1.0)
    )
    results = measured.measure(point)
    assert [head.rule.threshold for head in subject.heads] == [1.0] * 3
    with subject.thresholds(point.thresholds):
        early, exits = (getattr(subject.network(x[:10]), name) for name in ("label", "exit_index"))
    assert len(exits.unique()) > 1, "the inputs leave at several exits"
    full = subject.network.backbone(x[:10]).argmax(1)
    for name, result in results.items():
        wanted = full if "bare" in name else early
        assert result.accuracy == pytest.approx((wanted == labels).double().mean().item()), name
        assert result.error is None and result.counts["samples"] == 4 * measured.rounds
        assert result.mean_host_us == pytest.approx(US[name.partition("@")[0]])
    assert list(results["gated@as_is"].samples_by_exit.values()) == torch.bincount(exits, minlength=4).tolist()
    assert list(results["eager-bare@as_is"].samples_by_exit.values()) == [0, 0, 0, 10]


def test_what_answers_wrongly_is_not_timed(pretended, monkeypatch):
    subject, _ = small_subject()
    monkeypatch.setattr(Runner, "shift", 1)
    results = Pareto(subject, torch.zeros(12, dtype=torch.int64), "as_is").measure(
        OperatingPoint(NEVER, (1.0, 1.0, 1.0))
    )
    assert "answers differ" in results["gated@as_is"].error and results["gated@as_is"].samples is None
    assert pretended == [(["eager-bare@as_is", "graph-bare@as_is"], 6)]


def test_what_cannot_be_built_or_timed_is_an_error_and_the_rest_goes_on(pretended, monkeypatch):
    subject, _ = small_subject()

    def fails(variant, times=measuring.time_captures):
        def time_captures(calls, inputs, **how):
            if variant in calls:
                raise VariantFailed(variant) from RuntimeError("an illegal\naddress")
            return times(calls, inputs, **how)

        return time_captures

    def make_runner(network, example_input, *, exits, **_):
        if exits == "gated":
            raise RuntimeError("no conditional nodes")
        return Runner(network)

    monkeypatch.setattr(variants, "make_runner", make_runner)
    monkeypatch.setattr(measuring, "time_captures", fails("polled@as_is"))
    measured = Pareto(subject, torch.zeros(12, dtype=torch.int64), "as_is")
    results = measured.measure(OperatingPoint(NEVER, (1.0, 1.0, 1.0)))
    assert results["gated@as_is"].error == "RuntimeError: no conditional nodes"
    assert results["polled@as_is"].error == "RuntimeError: an illegal address"
    assert results["overlapped@as_is"].mean_host_us == pytest.approx(220.0)


@pytest.mark.parametrize("inputs", [1, 5, 6, 359])
def test_every_input_has_as_many_turns_with_changing_captures(inputs):
    turns = in_turns(inputs)
    assert len(turns) >= LEAST_ROUNDS and {turns.count(place) for place in range(inputs)} == {len(turns) // inputs}
    assert turns[:inputs] == list(range(inputs)), "the first pass is the test split in order"
    if 1 < inputs < LEAST_ROUNDS:
        assert len({(turn % 5, place) for turn, place in enumerate(turns)}) > 4 * inputs, "of the pairs nearly all"


def test_the_mean_weighs_exits_by_their_rounds_and_ignores_hiccups():
    # rounds 0 to 5 of two captures: exits 0, 0, 0, 0, 1, 1
    host = [[10.0, 10.0, 40.0], [10.0, 9000.0, 60.0]]
    assert mean_time(host, [0, 0, 0, 0, 1, 1]) == pytest.approx((4 * 10 + 2 * 50) / 6)


def test_thresholds_that_come_out_alike_are_measured_once(monkeypatch):
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), plain_heads(), example_input=torch.randn(2, 3, 16, 16)).eval()
    pixels = torch.randint(256, (20, 3, 16, 16), dtype=torch.uint8)
    chosen = {0.0: (1.0, 1.0, 1.0), 0.01: (0.5, 1.0, 0.9), 0.02: (0.5, 1.0, 0.9), 0.05: (0.2, 0.9, 0.9)}
    monkeypatch.setattr(
        measuring, "choose_thresholds", lambda confidence, correct, drop: SimpleNamespace(thresholds=chosen[drop])
    )
    points = operating_points(network, Split(pixels, torch.zeros(20).long(), torch.arange(20)), list(chosen))
    assert [(point.exits, point.thresholds) for point in points] == [
        ("never", chosen[0.0]),
        ("calibrated 1 %", chosen[0.01]),
        ("calibrated 5 %", chosen[0.05]),
    ]


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A checkpoint of a network for two classes of pictures, these, and a command that takes the CPU for a GPU."""
    monkeypatch.chdir(tmp_path)
    for name in ("dark", "light"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(5):
            grey = number * 10 + 150 * (name == "light")
            Image.new("L", (8, 8), grey).save(tmp_path / "pictures" / name / f"{number}.png")
    torch.manual_seed(0)
    network, classes = small_early_exit_network(2), ("dark", "light")
    save_checkpoint(tmp_path / "demo", network, backbone=BACKBONE, classes=classes, image_size=8)
    report = {"format": REPORT_FORMAT, "data": "pictures", "seed": 3, "image_size": 8}
    report["images"] = {"train": 6, "validation": 2, "test": 2}
    (tmp_path / "demo" / "report.json").write_text(json.dumps(report))
    compute_on_the_cpu(monkeypatch, running)
    monkeypatch.setattr(
        measuring, "choose_thresholds", lambda confidence, correct, drop: SimpleNamespace(thresholds=(10 * drop,) * 8)
    )
    monkeypatch.setattr(running, "operating_points", lambda *about: operating_points(*about, drops=(0.01,)))
    return tmp_path / "demo"


def test_the_command(checkpoint, pretended):
    arguments = ("pareto", "--checkpoint", checkpoint, "--data", "pictures", "--trunk", "as_is", "--batch", 1)
    done = tune(*arguments)
    assert done.exit_code == 0, done.output
    path = Path("autotune-records/pareto-nvidia-h200-fake.jsonl")
    assert "batch 1: calibrated 1 %" in done.stdout and f"Records: {path}" in done.stdout
    records = read_records(path)
    assert len(records) == 2 * 5 and len({record.run for record in records}) == 1
    gated = records[-1]
    assert (gated.variant, gated.exits, gated.kind) == ("gated@as_is", "calibrated 1 %", "pareto")
    assert gated.cell["model"] == "resnet18_small" and gated.cell["batch"] == 1
    assert gated.measured["samples"] == 2 and gated.measured["accuracy"] in (0.0, 0.5, 1.0)
    assert gated.measured["mean_host_us"] == pytest.approx(90.0)
    (pair,) = gated.paired
    assert (pair["role"], pair["mean_host_us"]) == ("bare", 200.0) and pair["mean_host_ratio"] == pytest.approx(0.45)
    assert set(gated.protocol["thresholds"].values()) == {0.1} and gated.protocol["data"] == "pictures"
    assert gated.protocol["samples_by_exit"]["layer1.0"] == 2, "of two classes one always has more than 0.1"
    row = ["calibrated 1 %", "gated@as_is", f"{gated.measured['accuracy']:.2%}", "90.0", "0.450", "90.0", "90.0"]
    assert f"| {' | '.join(row)} |" in tune("table", path, "--markdown").stdout


@pytest.mark.parametrize(
    ("report", "arguments", "message"),
    [
        (None, (), "has no report.json, wants a directory of `auxhead demo`"),
        ({"format": "x"}, (), "is no report of `auxhead demo` (KeyError('data'))"),
        (
            {"format": "x", "data": "pictures", "seed": 0, "image_size": 8, "images": {}},
            (),
            f"has format 'x', wants '{REPORT_FORMAT}'",
        ),
        (
            {"format": REPORT_FORMAT, "data": "cats", "seed": 0, "image_size": 8, "images": {}},
            (),
            "was trained on cats, got pictures; wants the same images",
        ),
        (
            {"format": REPORT_FORMAT, "data": "pictures", "seed": 0, "image_size": 8, "images": {"train": 7}},
            (),
            "had images {'train': 7}, got {'train': 6, 'validation': 2, 'test': 2}",
        ),
        ({}, ("--trunk", "fast"), "--trunk: got fast, wants one of as_is, cudnn"),
        ({}, ("--root", "x"), "--data: cannot be given together with --dataset or --root"),
    ],
    ids=["none", "fields", "format", "source", "sizes", "trunk", "options"],
)
def test_bad_input_is_one_line(checkpoint, report, arguments, message):
    if report is None:
        (checkpoint / "report.json").unlink()
    elif report:
        (checkpoint / "report.json").write_text(json.dumps(report))
    assert_one_line_error(tune("pareto", "--checkpoint", checkpoint, "--data", "pictures", *arguments), message)


def test_damaged_pictures_that_the_demo_left_out_are_left_out_again(checkpoint):
    Path("pictures/dark/damaged.png").write_bytes(b"")
    splits = demo_splits(checkpoint, load_demo(checkpoint), load_folder(Path("pictures")))
    assert [len(split.labels) for split in splits] == [6, 2, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device(checkpoint, monkeypatch):
    monkeypatch.setattr(running, "this_device", this_device)
    refused = tune("pareto", "--checkpoint", checkpoint, "--data", "pictures")
    assert_one_line_error(refused, "pareto: torch sees no CUDA device here, wants one")


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
    def test_every_runner_is_checked_and_timed(self, trunk):
        subject, x = small_subject(device="cuda")
        confidence = [logits.softmax(1).amax(1) for logits in subject.network.logits(x)]
        measured = Pareto(subject, torch.zeros(10, dtype=torch.int64), trunk)
        try:
            for thresholds in ((1.0, 1.0, 1.0), (confidence[0].quantile(0.5).item(), 1.0, 1.0)):
                results = measured.measure(OperatingPoint("tried", thresholds))
                assert len(results) == 5 and all(one.error is None for one in results.values()), results
                assert all(one.mean_host_us > 0 for one in results.values())
        finally:
            measured.close()
