"""Heads measured without a GPU: streams, events and graphs are simulated, kernels interpreted."""

import importlib

import pytest
import torch
from auxhead.autotune.measuring.subject import subject_of
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork
from support.example_models import SmallNet, plain_heads
from support.simulated_cuda import simulated_chains

alone_head = importlib.import_module("auxhead.autotune.measuring.heads_alone")
head_timing = importlib.import_module("auxhead.autotune.measuring.head_timing")


@pytest.fixture
def simulated(monkeypatch):
    """Streams, events and graphs that are none; kernels are interpreted."""
    if not runs_triton(torch.zeros(1)):
        pytest.skip("needs the interpreter")

    with simulated_chains(monkeypatch, 2):
        monkeypatch.setattr(torch, "compile", lambda module, **_options: module)
        monkeypatch.setattr(head_timing, "CHAIN", 2)
        monkeypatch.setattr(head_timing, "_MOST_WORKERS", 1)  # the interpreter runs one kernel at a time
        monkeypatch.setattr(alone_head, "_BUSY_SIZE", 8)
        monkeypatch.setattr(alone_head, "_CHECKED_LAUNCHES", 2)
        monkeypatch.setattr("auxhead.autotune.measuring.timers.BLOCK_US", 2.0)
        yield


@pytest.fixture
def timing(simulated):
    """The measurer of heads of a small network."""
    torch.manual_seed(0)
    heads, example = plain_heads(), torch.randn(1, 3, 8, 8)
    del heads["block0"]  # what is interpreted takes its time
    network = EarlyExitNetwork(SmallNet(), heads, example_input=example).eval()
    return head_timing.HeadTiming.of_network(subject_of("tests:small", network, example), "as_is")


@pytest.fixture
def timed_by(monkeypatch):
    """Puts a function in the place of ``time_rounds``."""

    def put(function):
        for module in ("head_timing", "timers"):
            monkeypatch.setattr(f"auxhead.autotune.measuring.{module}.time_rounds", function)

    return put
