"""The command ``auxhead-tune plan`` without a GPU: what it prints, keeps and refuses."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from auxhead.autotune.measuring.cells import NEVER
from auxhead.autotune.measuring.subject import Subject, subject_of
from auxhead.model import make_runner
from support.command_line import assert_one_line_error, tune
from support.planner_fakes import FakeGpu, images, small_network
from support.pretended_gpu import compute_on_the_cpu

pytestmark = pytest.mark.usefixtures("without_interpreter")
running = importlib.import_module("auxhead.autotune.plan.run")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    compute_on_the_cpu(monkeypatch, running)
    monkeypatch.setattr("auxhead.autotune.plan.run.find_subject", lambda model: lambda: subject(model))
    return FakeGpu(monkeypatch)


def subject(model: str = "tests:small") -> Subject:
    torch.manual_seed(0)
    return subject_of(model, small_network(threshold=0.7), images(6))


def plan(*arguments: object) -> Any:
    return tune("plan", *arguments)


def printed(*arguments: object) -> list[str]:
    result = plan(*arguments)
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines() if line.strip()]


def test_the_table_the_choice_and_its_reason(gpu: FakeGpu) -> None:
    gpu.us |= {"serial": 120.0, "polled": 60.0}
    gpu.fails["gated"] = RuntimeError("no conditional nodes here")
    found = printed("tests:small", "--batch", 2, "--trunk", "as_is")
    assert found[0] == ("tests:small float32, batch 2, 5 classes, 3 heads (own), input 3x8x8; trunk as_is; exits own")
    assert found[3:8] == [
        "serial 120.1 (120.0-120.2) 60.1 (60.0-60.1) 1.200 1.200",
        "overlapped (1 fork) 100.1 (100.0-100.2) 50.0 (50.0-50.1) 1.000 1.000 plain graph",
        "overlapped (2 forks) 100.1 (100.0-100.2) 50.0 (50.0-50.1) 1.000 1.000",
        "polled 60.1 (60.0-60.1) 30.0 (30.0-30.1) 0.600 0.600 chosen",
        "gated left out: no conditional nodes here",
    ]
    shares = [share for share in found if share.startswith("Samples leave at: ")]
    assert shares == [f"Samples leave at: {expected_shares()}."]
    reason = "60.1 us to the answer: 40.0% less time than the plain graph, overlapped (1 fork), 100.1 us"
    assert found[-2:] == [f"Polled: {reason}.", "Measured now."]


def test_trunks_are_measured_beside(gpu: FakeGpu) -> None:
    gpu.times_as_long |= {"cudnn": 0.8, "inductor": 0.9}
    found = printed("tests:small", "--batch", 2)
    assert found[0].endswith("; trunk auto; exits own")
    assert found[3] == "overlapped (1 fork) 100.1 (100.0-100.2) 50.0 (50.0-50.1) 1.000 1.000 plain graph"
    assert found[4] == "serial on cudnn 80.1 (80.0-80.2) 40.0 (40.0-40.1) 0.800 0.800 chosen"
    assert "The plain graph by trunk, us: as_is 100.1, cudnn 80.1, inductor 90.1." in found
    quick = printed("tests:small", "--batch", 2, "--budget", "quick")
    assert "trunk inductor left out: compiling takes longer than the 10 s of budget='quick'" in quick


def expected_shares() -> str:
    of = subject()
    exits = of.network(of.example).exit_index
    return ", ".join(
        f"{(exits == place).float().mean().item():.0%} {where}"
        for place, where in enumerate((*of.network.taps, "classifier"))
    )


def test_a_plan_is_kept_for_the_command_and_for_make_runner(gpu: FakeGpu, tmp_path: Path) -> None:
    gpu.us["gated"] = 50.0
    path = tmp_path / "plan.json"
    printed("tests:small", "--batch", 2, "--batch", 4)
    assert gpu.measured == 2 and not list(tmp_path.iterdir())
    printed("tests:small", "--batch", 2, "--batch", 4, "--plan", path)
    again = printed("tests:small", "--batch", 4, "--batch", 2, "--plan", path)
    assert gpu.measured == 4 and sum(line.startswith("From the plan file, measured at 20") for line in again) == 2
    of = subject()
    runner = make_runner(of.network, of.example, batch_sizes=(2, 4), plan=path)
    assert gpu.measured == 4 and "Batch 2: gated, trunk as_is.\n" in runner.describe()
    runner.close()
    other = printed("tests:small", "--batch", 2, "--plan", path)
    assert gpu.measured == 5 and other.count("Measured now.") == 1 and gpu.open == 0


def test_a_plan_file_is_for_one_exit_pattern(gpu: FakeGpu, tmp_path: Path) -> None:
    arguments = ("tests:small", "--exits", "block*", "--plan", tmp_path / "plan.json")
    assert_one_line_error(plan(*arguments), "--plan: holds the plan of one exit pattern, got block0, block1, block2")
    folder = plan("tests:small", "--plan", tmp_path)
    assert_one_line_error(folder, "a folder, wants the path of a JSON file")
    assert gpu.measured == 0


def test_exit_patterns_are_measured_by_their_own_rules(gpu: FakeGpu) -> None:
    found = printed("tests:small", "--exits", "block*", "--exits", NEVER)
    shares = [line for line in found if line.startswith("Samples leave at")]
    assert shares == [
        "Samples leave at: 0% block0, 0% block1, 0% block2, 100% classifier.",
        "Samples leave at: 100% block0, 0% block1, 0% block2, 0% classifier.",
        "Samples leave at: 0% block0, 100% block1, 0% block2, 0% classifier.",
        "Samples leave at: 0% block0, 0% block1, 100% block2, 0% classifier.",
    ]
    assert found[0].endswith("; trunk auto; exits never") and "batch 6" in found[0] and gpu.measured == 4


def test_a_resnet_is_made_for_the_largest_batch(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = []

    def build(cell: object, _device: object) -> Subject:
        cells.append(cell)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(running, "build_subject", build)
    refused = plan("resnet18", "--batch", 8, "--batch", 2)
    assert_one_line_error(refused, "4 heads (stages), input 3x224x224: CUDA out of memory. Tried")
    (cell,) = cells
    assert (cell.model, cell.batch, cell.dtype, cell.classes) == ("resnet18", 8, "float16", 1000)


def test_a_layer_that_cannot_be_captured_is_one_line(gpu: FakeGpu) -> None:
    gpu.fails["overlapped (1 fork)"] = RuntimeError("backbone: layer 'block1' cannot be captured in a CUDA graph")
    assert_one_line_error(plan("tests:small"), "input 3x8x8: backbone: layer 'block1' cannot be captured")


def test_a_layer_that_a_network_of_ones_own_has_not_is_one_line(gpu: FakeGpu) -> None:
    wrong = plan("tests:small", "--exits", "layer5")
    assert_one_line_error(wrong, "--exits: got layer5, wants names or globs of: never, block0")
    assert gpu.measured == 0
