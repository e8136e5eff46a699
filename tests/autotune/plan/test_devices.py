"""The command ``auxhead-tune plan --devices N`` without a GPU: its table, its advice, and what it refuses."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from auxhead.autotune.measuring.subject import Subject, subject_of
from auxhead.autotune.plan import devices
from auxhead.autotune.plan.layouts import SegmentTimes, best_layouts
from support.command_line import assert_one_line_error, tune
from support.planner_fakes import images, small_network
from support.pretended_gpu import compute_on_the_cpu

pytestmark = pytest.mark.usefixtures("without_interpreter")
running = importlib.import_module("auxhead.autotune.plan.run")
TAPS = ("block0", "block1", "block2")


def segments(split_size: int, link: float = 0.1) -> SegmentTimes:
    """Of 4 ms together for 16 samples, and a part that small micro-batches do not save."""
    ms = [part * (split_size + 4) / 20 for part in (1.0, 1.0, 1.5, 0.5)]
    return SegmentTimes(split_size, ms, 0.05, [0.0] * 3, [0.01] * 3, [link] * 3)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Split sizes that are measured, and the time of 1 MB on the link."""
    found: list[tuple[int, float]] = []

    def measure(network: object, samples: torch.Tensor, split_size: int, link_ms: Any) -> SegmentTimes:
        found.append((split_size, link_ms(10**6)))
        return segments(split_size)

    def subject(model: str) -> Subject:
        torch.manual_seed(0)
        return subject_of(model, small_network(threshold=0.7), images(16))

    compute_on_the_cpu(monkeypatch, running)
    monkeypatch.setattr(running, "find_subject", lambda model: lambda: subject(model))
    monkeypatch.setattr(devices, "measure_segments", measure)
    pretend_gpus(monkeypatch, 1)
    return found


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    cuda = SimpleNamespace(device_count=lambda: count)
    monkeypatch.setattr(devices, "torch", SimpleNamespace(cuda=cuda, device=torch.device))


def printed(*arguments: object) -> list[str]:
    result = tune("plan", "tests:small", *arguments)
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines() if line.strip()]


def test_the_table_and_the_advice(measured: list[tuple[int, float]]) -> None:
    found = printed("--devices", 2, "--exits", "never", "--batch", 64)
    assert found[0].endswith("batch 64, 5 classes, 3 heads (own), input 3x8x8; exits never; 2 GPUs, predicted")
    assert [size for size, _ in measured] == [2, 4, 8, 16, 32, 64]
    # a replica of all: 4 x 68 / 20 + 0.05 ms
    assert found[3].split() == ["1", "none", "2", "64", "13.65", "9,377", "2.00", "1.00", "100%", "yes"]
    stages = next(line.split() for line in found if line.startswith("1 + 1 "))
    assert stages[3:6] == ["block1", "1", "16"] and stages[-1] == "yes"
    assert "Samples leave at: 0% block0, 0% block1, 0% block2, 100% classifier." in found[-5]
    assert found[-4].startswith("Hosts of several stages: 0.78 ms to hand a micro-batch on and 1.56 ms a request, ")
    assert found[-2] == ("Best: 2 replicas of the whole network, each on 1 GPU, 9,377 images/s, 2.00 times one GPU's.")
    command = "torchrun --standalone --nproc-per-node 2 -m auxhead.model infer"
    assert found[-1] == f"Run it by any runner in a process for each GPU, as `{command}` does."


def test_exit_shares_are_those_of_the_pattern(measured: list[tuple[int, float]]) -> None:
    found = printed("--devices", 4, "--exits", "block0", "--exits", "never", "--batch", 64)
    shares = [line.split(". ")[0] for line in found if line.startswith("Samples leave at")]
    assert shares == [
        "Samples leave at: 0% block0, 0% block1, 0% block2, 100% classifier",
        "Samples leave at: 100% block0, 0% block1, 0% block2, 0% classifier",
    ]
    assert len(measured) == 6  # once for both


@pytest.mark.parametrize(
    ("options", "gpus", "ms", "words"),
    [
        ((), 1, 1 / 300, "Links: 300 GB/s, a guess: there is one GPU here and no --link."),
        (("--link", 100), 2, 1 / 100, "Links: 100 GB/s, as --link says."),
        ((), 2, 7.0, "Links: measured between cuda:0 and cuda:1."),
    ],
)
def test_the_link(
    measured: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch, options: Any, gpus: int, ms: float, words: str
) -> None:
    pretend_gpus(monkeypatch, gpus)
    monkeypatch.setattr(devices, "copy_ms", lambda size, *between: 7.0 if size == 10**6 and len(between) == 2 else None)
    found = printed("--devices", 2, *options)
    assert measured[0][1] == pytest.approx(ms) and any(words in line for line in found)


def layouts_of(shares: list[float], gpus: int) -> list[str]:
    times = [segments(size) for size in (4, 16)]
    [alone] = best_layouts(times, shares, 320, 1)
    return devices.advice(best_layouts(times, shares, 320, gpus), alone, TAPS)


def test_the_advice_where_a_stage_should_have_several_gpus() -> None:
    best, today, how = layouts_of([0.9, 0.0, 0.0, 0.1], 8)
    assert best.startswith("Best: ") and best.endswith("are not run yet: `pipelined` has one each.")
    assert today.startswith("Best that runs today: ") and "times one GPU's." in today
    assert how == (
        "Run it by pipelined(network, x, split_size=16, stages=['block0'], trunk=\"cudnn\") in a script, started by "
        "`torchrun --standalone --nproc-per-node 2 script.py`, 4 times, each with GPUs of its own in "
        "CUDA_VISIBLE_DEVICES; deal the requests to them."
    )


def test_the_advice_for_one_pipeline() -> None:
    best, how = layouts_of([0.5, 0.0, 0.0, 0.5], 2)
    assert best.startswith("Best: 2 stages on 1 + 1 GPUs, ")
    assert how.endswith("started by `torchrun --standalone --nproc-per-node 2 script.py`.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "100"], "--link: got 100, wants --devices of 2 or more beside it"),
        (["--devices", "2", "--link", "0"], "--link: got 0, wants GB/s greater than 0"),
        (["--devices", "2", "--trunk", "cudnn"], "--trunk: got cudnn, wants none beside --devices 2"),
        (["--devices", "2", "--budget", "quick"], "--budget: got quick, wants none beside --devices 2"),
        (["--devices", "2", "--plan", "plan.json"], "--plan: got plan.json, wants none beside --devices 2"),
        (["--devices", "2", "--exits", "block9"], "--exits: got block9, wants names or globs of: never, block0"),
    ],
)
def test_bad_options_are_one_line(measured: list[tuple[int, float]], arguments: list[str], message: str) -> None:
    assert_one_line_error(tune("plan", "tests:small", *arguments), message)
    assert not measured


def test_a_network_that_cannot_be_cut_is_one_line(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> SegmentTimes:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(devices, "measure_segments", measure)
    assert_one_line_error(tune("plan", "tests:small", "--devices", "2"), "input 3x8x8: CUDA out of memory. Tried")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device() -> None:
    assert_one_line_error(tune("plan", "resnet18", "--devices", "2"), "plan: torch sees no CUDA device here, wants one")
