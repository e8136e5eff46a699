"""Graph runners under patience, with streams and graphs simulated and kernels interpreted."""

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork, make_runner
from auxhead.model.runners.graph_runner import GraphRunner
from support.example_models import SmallNet, plain_heads
from support.patience_cases import RULES, assert_answers, set_rules
from support.simulated_cuda import simulated_cuda

pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here"),
    pytest.mark.usefixtures("without_interpreter"),  # what the loop's logits come from
]


def images(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 8, 8) * torch.rand(samples, 1, 1, 1) * 4


WAYS = {
    "overlapped": {"exits": "overlapped"},
    "forked": {"exits": "overlapped", "forks": ("block0",)},
    "polled": {"exits": "polled"},
    "gated": {"exits": "gated"},
    "compact": {"exits": "polled", "compact": True},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_runners_count_heads_that_agree(way, rules, monkeypatch):
    # every move would pay
    monkeypatch.setattr(GraphRunner, "_segment_times", lambda runner, x: [1000.0 * len(x)] * (len(runner._heads) + 1))
    network = EarlyExitNetwork(SmallNet(), plain_heads(), 0.0).eval()
    set_rules(network, rules)
    batches = [images(samples) for samples in (3, 5)]
    with simulated_cuda():
        runner = make_runner(network, images(2), batch_sizes=(4, 2), **way)
        found = [runner(x) for x in batches]
        said = runner.describe()
    for x, answer in zip(batches, found, strict=True):
        assert_answers(answer, network, x, rules)
    if "compact" in way:
        reason = "a head behind it exits under patience, which counts the labels that earlier heads gave to a row."
        patient = max(index for index, rule in enumerate(rules) if rule.criterion == "patience")
        for index, tap in enumerate(network.taps):
            assert (f"Not compacted after {tap}: {reason}" in said) == (index < patient)
            assert (f"Gathered after {tap}" in said) == (index >= patient)
