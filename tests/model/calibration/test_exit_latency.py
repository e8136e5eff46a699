"""Latencies of exits: what is timed, rules put back, and what batches come to."""

import functools
import time

import pytest
import torch
from auxhead.model import EagerRunner, EarlyExitNetwork, ExitLatencies, ExitRule, FusedAuxHead, measure_exit_latencies
from auxhead.model.calibration.exit_latency import expected_latency
from torch import nn


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x


@pytest.fixture
def network(without_interpreter):
    layers = [nn.Sequential(nn.Conv2d(3, 8, 1)), nn.Sequential(Slow()), nn.Sequential(Slow(), nn.AdaptiveAvgPool2d(1))]
    backbone = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))
    return EarlyExitNetwork(backbone, {"0": FusedAuxHead(8, 3), "1": FusedAuxHead(8, 3)}).eval()


def test_exits_are_timed_in_turns_and_rules_are_put_back(network):
    network.set_rules({"0": ExitRule(0.7, temperature=2.0), "1": ExitRule(0.8, enabled=False)})
    before = [repr(head.rule) for head in network.fused_heads]
    found = measure_exit_latencies(network, functools.partial(network, stop=True), torch.randn(5, 3, 4, 4), rounds=2)
    first, second, last = found.milliseconds
    assert first < last and second >= 20 and last >= 40 and found.batch_size == 5
    assert [repr(head.rule) for head in network.fused_heads] == before


def test_a_runner_of_another_network_is_refused_and_rules_are_put_back(network):
    other = EarlyExitNetwork(network.backbone, {"0": FusedAuxHead(8, 3), "1": FusedAuxHead(8, 3)}).eval()
    network.set_rules(0.7)
    with pytest.raises(ValueError, match=r"runner: answered at exits \[2\] where exit 0 alone is open, wants a runner"):
        measure_exit_latencies(network, EagerRunner(other), torch.randn(1, 3, 4, 4), rounds=1)
    assert [head.rule.threshold for head in network.fused_heads] == [0.7, 0.7]


def test_a_batch_leaves_with_its_last_sample():
    exits = torch.tensor([0, 0, 1, 0, 2, 0])

    def of(size):
        return expected_latency(exits, ExitLatencies((1.0, 10.0, 100.0), size, "", ""))

    assert of(1) == pytest.approx((4 * 1 + 10 + 100) / 6)
    assert of(2) == pytest.approx((1 + 10 + 10 + 100 + 100 + 1) / 6)  # the last one goes on with the first sample
    assert of(6) == 100
    with pytest.raises(ValueError, match="latencies: are of batches of 7, wants 1 to 6"):
        of(7)


def test_bad_arguments_and_latencies_that_are_no_times_are_named(network):
    for times in ((1.0, float("nan")), (-1.0, 2.0), (1.0, float("inf")), (1.0, "2"), 3.0, (None, 1.0)):
        with pytest.raises((ValueError, TypeError), match="^milliseconds: got"):
            ExitLatencies(times, 1, "", "")
    for size in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="^batch_size: got .* wants a whole number from 1"):
            ExitLatencies((1.0, 2.0), size, "", "")
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(TypeError, match="network: got Sequential, wants an EarlyExitNetwork"):
        measure_exit_latencies(network.backbone, network, x)
    with pytest.raises(ValueError, match="rounds: got 0, wants a whole number of at least 1"):
        measure_exit_latencies(network, network, x, rounds=0)
    with pytest.raises(ValueError, match="x: got shape"):
        measure_exit_latencies(network, network, x[:0])
