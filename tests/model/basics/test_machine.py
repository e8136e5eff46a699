"""The report of a machine: a line each, of the very facts that records keep, whatever is not there."""

import sys
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.measuring.environment import environment
from auxhead.model.basics import machine

NAMES = [
    "auxhead", "torch", "triton", "torchvision", "python", "driver", "cuda", "cudnn", "gpu", "processor", "system"
]  # fmt: skip


def told() -> dict[str, list[str]]:
    """What the report says, by the first word of a line."""
    found: dict[str, list[str]] = {}
    for line in machine.report().splitlines():
        name, _, said = line.partition(" ")
        found.setdefault(name, []).append(said.strip())
    return found


def test_it_says_what_records_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    recorded = environment(torch.device("cpu"))
    assert recorded["torch"] == torch.__version__ and recorded["python"] == sys.version.split()[0]
    found = told()
    assert [*found] == NAMES
    for name in NAMES[:8]:
        assert found[name] == [str(recorded[name] or "none found")]
    assert found["gpu"] == ["none that torch sees"]


def test_each_gpu_has_a_line_and_one_that_fails_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0, total_memory=140 * 2**30)

    def properties(index: int) -> SimpleNamespace:
        if index == 2:
            raise RuntimeError("CUDA error:\nall of it is busy")
        return gpu

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert told()["gpu"] == [
        "0: NVIDIA H200, 132 SMs, capability 9.0, 140 GiB",
        "1: NVIDIA H200, 132 SMs, capability 9.0, 140 GiB",
        "unknown: RuntimeError: CUDA error: all of it is busy",
    ]


def test_it_does_without_torch_triton_and_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("triton", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    installed = machine.package_version
    monkeypatch.setattr(machine, "package_version", lambda name: None if name == "triton" else installed(name))
    monkeypatch.setattr(machine, "driver_version", lambda: None)
    monkeypatch.setattr(machine, "processor_name", lambda: None)
    found = told()
    assert [*found] == NAMES and found["triton"] == found["driver"] == found["cuda"] == ["none found"]
    assert found["torch"] == [installed("torch")], "what is installed, and cannot be imported"
    assert found["gpu"][0].startswith("unknown: ModuleNotFoundError: import of torch halted")


def test_a_cudnn_that_does_not_fit_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def version() -> int:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    found = machine.versions()
    assert found["cudnn"] is None and found["torch"] == torch.__version__ and found["cuda"] == torch.version.cuda
