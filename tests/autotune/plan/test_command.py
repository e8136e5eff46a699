"""The command ``auxhead-tune plan`` without a GPU: what it prints, keeps and refuses."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from auxhead.autotune.measuring.cells import NEVER
from auxhead.autotune.measuring.subject import Subject, find_subject, subject_of
from auxhead.model import make_runner
from support.command_line import assert_one_line_error, tune
from support.planner_fakes import FakeGpu, images, small_network
from support.pretended_gpu import compute_on_the_cpu

pytestmark = pytest.mark.usefixtures("without_interpreter")
running = importlib.import_module("auxhead.autotune.plan.run")
CUDA = torch.device("cuda", 0)
FACTORY = """
import torch
from support.planner_fakes import images, small_network

def small():
    return small_network(), images(6)

def large():
    raise torch.OutOfMemoryError("CUDA out of memory.")
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    compute_on_the_cpu(monkeypatch, running)
    monkeypatch.setattr("auxhead.autotune.plan.run.find_subject", lambda model, **_: lambda: subject(model))
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


def test_advice_on_gpus_comes_after_the_tables(gpu: FakeGpu) -> None:
    gpu.us |= {"polled": 60.0}
    found = printed("tests:small", "--batch", 2, "--trunk", "as_is", "--gpus", 2)
    (title,) = (place for place, line in enumerate(found) if line == "tests:small on 2 GPUs; exits own")
    assert found[title - 1] == "Measured now."
    assert found[title + 3 : title + 5] == ["2 one GPU 1 0.06 33,300 measured", "2 replicas 2 0.06 66,600 predicted"]
    assert [line.split()[1].strip(",") for line in found[title + 5 : title + 7]] == ["parallelize", "pipelined"]
    text = " ".join(found[title:])
    assert "Take one GPU for the soonest answer (polled), and" in text
    assert 'trunk="as_is"' in text and "in batches of 1, 2, 8, 64," in text


def test_segments_are_measured_once_for_all_exits(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    real = running.measure_facts

    def measure_facts(*arguments: object) -> object:
        measured.append(arguments[-2:])
        return real(*arguments)

    monkeypatch.setattr(running, "measure_facts", measure_facts)
    gpu.times_as_long |= {"inductor": 0.5}
    found = printed("tests:small", "--exits", NEVER, "--exits", "block0", "--batch", 4, "--batch", 2, "--gpus", 5)
    assert measured == [(4, "cudnn")]
    assert sum(line.startswith("tests:small on 5 GPUs; exits ") for line in found) == 2
    assert sum("It cannot be split into 5 parts, 4 at most" in line for line in found) == 2


def test_what_runs_out_of_memory_is_only_advised_on(gpu: FakeGpu) -> None:
    gpu.fails["overlapped (1 fork)"] = torch.OutOfMemoryError("CUDA out of memory.\nTried")
    found = printed("tests:small", "--exits", "block*", "--gpus", 2)
    assert found[0] == "tests:small on 2 GPUs; exits block0" and not any(line.endswith("measured") for line in found)
    text = " ".join(found)
    assert text.count("It does not fit on one GPU, which ran out of memory: 0.0 MiB of parameters and buffers") == 1
    assert "cut behind block" in text and gpu.open == 0
    assert_one_line_error(plan("tests:small", "--exits", "block*"), "input 3x8x8: CUDA out of memory. Tried")


@pytest.fixture
def full_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One with no room for a network, and a factory of networks on the CPU, where segments are measured."""
    (tmp_path / "factory_of_plans.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(running, "find_subject", find_subject)
    monkeypatch.setattr(running, "this_device", lambda *_: CUDA)
    moved, measure_facts = running._moved, running.measure_facts

    def no_room(of: Subject, device: torch.device) -> Subject:
        if device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return moved(of, device)

    def on_the_cpu(network: object, x: object, device: torch.device, *others: object) -> object:
        assert device == CUDA
        return measure_facts(network, x, torch.device("cpu"), *others)

    monkeypatch.setattr(running, "_moved", no_room)
    monkeypatch.setattr(running, "measure_facts", on_the_cpu)


def test_a_network_on_the_cpu_that_has_no_room(gpu: FakeGpu, full_gpu: None) -> None:
    found = printed("factory_of_plans:small", "--gpus", 2)
    assert found[0] == "factory_of_plans:small on 2 GPUs; exits own" and gpu.measured == 0
    assert [line.split()[:2] for line in found[3:5]] == [["6", "parallelize"], ["6", "pipelined,"]]
    assert_one_line_error(plan("factory_of_plans:small"), "a batch [N, ...], on one CUDA device")
    large = plan("factory_of_plans:large", "--gpus", 2)
    assert_one_line_error(large, "MODEL: factory_of_plans:large: CUDA out of memory.; wants it on the CPU")


def test_a_resnet_that_has_no_room(gpu: FakeGpu, full_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def build(_cell: object, device: torch.device) -> Subject:
        made.append(device.type)
        if device.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return subject("resnet18")

    monkeypatch.setattr(running, "build_subject", build)
    found = printed("resnet18", "--exits", NEVER, "--batch", 2, "--gpus", 2)
    assert found[0] == "resnet18 on 2 GPUs; exits never" and made == ["cuda", "cpu"]
