"""The demo's latency table: its rows, and that nothing is timed that answers wrongly; on a GPU with real graphs."""

from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.bench import demo_latency as latency
from auxhead.autotune.bench.demo_latency import BACKBONE, EAGER, GRAPH, HEADS, STOP, demo_latency
from auxhead.autotune.measuring.subject import random_pictures
from auxhead.model import EarlyExitNetwork
from support.example_models import SmallNet, needs_gpu, plain_heads

VARIANTS = [(EAGER, name) for name in (BACKBONE, HEADS, STOP)]
VARIANTS += [(GRAPH, name) for name in (BACKBONE, HEADS)]


@pytest.fixture
def network(without_interpreter):
    return EarlyExitNetwork(SmallNet(), plain_heads(), rules=0.6).eval()


@pytest.fixture
def faked(monkeypatch):
    """Graphs run eagerly, and each call takes as long as its variant has letters."""

    def time_captures(variants, inputs, *, rounds, warm_up, repeat):
        return {name: SimpleNamespace(device=[[float(len(name))] * rounds], host=[[9.0] * rounds]) for name in variants}

    monkeypatch.setattr(latency, "_captured", lambda function, example: function)
    monkeypatch.setattr(latency, "time_captures", time_captures)


def test_a_row_for_each_batch_size_mode_and_variant(network, faked):
    rows = demo_latency(network, torch.randn(40, 3, 16, 16), (1, 16, 10_000), rounds=5)
    assert [(row["batch"], (row["mode"], row["variant"])) for row in rows] == [
        (batch, variant) for batch in (1, 16) for variant in VARIANTS
    ]
    for row in rows:
        assert list(row) == ["batch", "mode", "variant", "calls", "device_us", "host_us"] and row["calls"] == 5
        us = float(len(row["variant"]))
        assert row["device_us"] == {"median": us, "p20": us, "p80": us} and row["host_us"]["median"] == 9.0


def test_nothing_is_timed_that_answers_wrongly(network, faked, monkeypatch):
    """Above all no graph: here one that goes on answering for the picture it was captured with."""
    monkeypatch.setattr(latency, "_captured", lambda function, example: lambda x: function(example))
    with pytest.raises(RuntimeError, match="CUDA graph does not answer as it should; not timed"):
        demo_latency(network, 4.0 * random_pictures(64, (3, 16, 16), torch.device("cpu")), (16,), rounds=5)


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_rows(self, network):
        rows = demo_latency(network.cuda(), torch.randn(40, 3, 16, 16, device="cuda"), (1, 16), rounds=10)
        assert [(row["mode"], row["variant"]) for row in rows] == 2 * VARIANTS
        for row in rows:
            for kind in ("device_us", "host_us"):
                assert 0 < row[kind]["p20"] <= row[kind]["median"] <= row[kind]["p80"]
