"""How often the bound holds: counted on splits of what a network has said, and in the record of the repository."""

import json
from importlib.resources import files

import pytest
import torch
from auxhead.autotune.coverage.measure import repeated
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from auxhead.model.calibration.exit_logits import ExitLogits
from torch import nn

RECORD = json.loads((files("auxhead.autotune.records") / "cpu" / "coverage-digits.json").read_text())


def test_the_record_is_of_100_splits_and_the_bound_holds_in_90_of_them():
    rows = RECORD["repeats"]
    assert [row["seed"] for row in rows] == list(range(100))
    assert (RECORD["max_accuracy_drop"], RECORD["confidence"]) == (0.01, 0.9)
    for row in rows:
        assert row["accuracy_drop"] == pytest.approx(row["full_accuracy"] - row["accuracy"])
        assert row["within"] == (row["accuracy_drop"] <= row["max_accuracy_drop"] + 1e-9)
        assert sum(row["shares"]) == pytest.approx(1.0) and len(row["shares"]) == len(RECORD["exits"])
    assert RECORD["within"] == sum(row["within"] for row in rows) >= 90
    assert RECORD["reachable"] == sum(row["reachable"] for row in rows)


def test_each_seed_is_a_split_of_its_own():
    """A head that is right where it is sure, and a classifier that is always right."""
    labels = torch.arange(300) % 3
    sure = torch.rand(300)
    right = nn.functional.one_hot(labels, 3).float()
    wrong = nn.functional.one_hot((labels + 1) % 3, 3).float()
    head = torch.where((sure > 0.3)[:, None], right, wrong) * (1 + 5 * sure)[:, None]
    collected = ExitLogits(
        torch.stack([head, 9 * right]),
        labels,
        [index.to_bytes(2, "big") for index in range(300)],
        frozenset(),
        None,
        (0.5, 1.0),
    )
    network = EarlyExitNetwork(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 3)), {"0": FusedAuxHead(4, 3)}
    )
    before = repr(network.fused_heads[0].rule)
    rows = list(repeated(network, collected, 0.05, 0.9, 4))
    assert [row["seed"] for row in rows] == [0, 1, 2, 3] and len({row["mean_exit"] for row in rows}) > 1
    assert all(row["reachable"] and row["full_accuracy"] == 1.0 and row["shares"][0] > 0.3 for row in rows)
    assert repr(network.fused_heads[0].rule) == before
