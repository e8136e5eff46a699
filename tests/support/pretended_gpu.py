"""Fake GPU for commands: they find one, and a test sets the measurements that they get."""

from types import SimpleNamespace

import pytest
import torch

NAME = "NVIDIA H200 (fake)"
#: Its environment in records.
ENVIRONMENT = {
    "gpu": "H200",
    "driver": "580",
    "torch": "2.11",
    "triton": "3.6",
    "cudnn": 1,
    "cuda": "13",
    "sm_count": 132,
    "commit": "c",
    "clocks": None,
}
_CUDA = {
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "get_device_name": lambda _device: NAME,
    "get_device_capability": lambda _device: (9, 0),
    "memory_allocated": lambda _device: 0,
    "empty_cache": lambda: None,
}
_MEASURED = {
    "environment": lambda _device: ENVIRONMENT,
    "clocks": lambda _device: {"sm_mhz": 1980.0},
    "build_subject": lambda cell, _device: cell,
}
#: Names of them that each measuring command uses.
_USED = {
    "heads.run": ("clocks",),
    "heads.run_random": ("environment", "clocks"),
    "measuring.networks": ("environment", "build_subject"),
    "overlap.run": ("clocks",),
}


@pytest.fixture
def pretended_gpu(monkeypatch, tmp_path):
    """Commands find it, take a cell for its network, and put records into the folder that is returned."""
    monkeypatch.chdir(tmp_path)
    for name, answer in _CUDA.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    for module, names in _USED.items():
        for name in names:
            monkeypatch.setattr(f"auxhead.autotune.{module}.{name}", _MEASURED[name])
    return tmp_path / "autotune-records"


def torch_of_the_cpu():
    """``torch`` for a command that is to find the GPU, and to compute on the CPU all the same."""
    replaced = {"cuda": SimpleNamespace(**_CUDA), "device": lambda *_: torch.device("cpu")}
    return SimpleNamespace(**{**vars(torch), **replaced})


def compute_on_the_cpu(monkeypatch, run):
    """Let the module that runs a command find the GPU, and compute on the CPU all the same."""
    monkeypatch.setattr(run, "torch", torch_of_the_cpu(), raising=False)
    monkeypatch.setattr(run, "this_device", lambda *_: torch.device("cpu"))
