"""Latencies of exits, and budgets of latency and work: what is timed, the strictest candidate that meets one."""

import functools
import time

import pytest
import torch
from auxhead.model import (
    EagerRunner,
    EarlyExitNetwork,
    ExitLatencies,
    ExitRule,
    FusedAuxHead,
    calibrate_network,
    measure_exit_latencies,
)
from auxhead.model.calibration.exit_latency import expected_latency
from auxhead.model.calibration.search import ScoredSamples, curve_of, within_cost
from auxhead.model.calibration.thresholds import threshold_path
from hypothesis import given
from hypothesis import strategies as st
from support.digits_network import digits
from torch import nn


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x


@pytest.fixture
def slow(without_interpreter):
    layers = [nn.Sequential(nn.Conv2d(3, 8, 1)), nn.Sequential(Slow()), nn.Sequential(Slow(), nn.AdaptiveAvgPool2d(1))]
    backbone = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))
    return EarlyExitNetwork(backbone, {"0": FusedAuxHead(8, 3), "1": FusedAuxHead(8, 3)}).eval()


def test_exits_are_timed_in_turns_and_rules_are_put_back(slow):
    slow.set_rules({"0": ExitRule(0.7, temperature=2.0), "1": ExitRule(0.8, enabled=False)})
    before = [repr(head.rule) for head in slow.fused_heads]
    found = measure_exit_latencies(slow, functools.partial(slow, stop=True), torch.randn(5, 3, 4, 4), rounds=2)
    first, second, last = found.milliseconds
    assert first < last and second >= 20 and last >= 40 and found.batch_size == 5
    assert [repr(head.rule) for head in slow.fused_heads] == before


def test_a_runner_of_another_network_is_refused_and_rules_are_put_back(slow):
    other = EarlyExitNetwork(slow.backbone, {"0": FusedAuxHead(8, 3), "1": FusedAuxHead(8, 3)}).eval()
    slow.set_rules(0.7)
    with pytest.raises(ValueError, match=r"runner: answered at exits \[2\] where exit 0 alone is open, wants a runner"):
        measure_exit_latencies(slow, EagerRunner(other), torch.randn(1, 3, 4, 4), rounds=1)
    assert [head.rule.threshold for head in slow.fused_heads] == [0.7, 0.7]


def test_a_batch_leaves_with_its_last_sample():
    exits = torch.tensor([0, 0, 1, 0, 2, 0])

    def of(size):
        return expected_latency(exits, ExitLatencies((1.0, 10.0, 100.0), size, "", ""))

    assert of(1) == pytest.approx((4 * 1 + 10 + 100) / 6)
    assert of(2) == pytest.approx((1 + 10 + 10 + 100 + 100 + 1) / 6)  # the last one goes on with the first sample
    assert of(6) == 100
    with pytest.raises(ValueError, match="latencies: are of batches of 7, wants 1 to 6"):
        of(7)


def test_bad_arguments_and_latencies_that_are_no_times_are_named(slow):
    for times in ((1.0, float("nan")), (-1.0, 2.0), (1.0, float("inf")), (1.0, "2"), 3.0, (None, 1.0)):
        with pytest.raises((ValueError, TypeError), match="^milliseconds: got"):
            ExitLatencies(times, 1, "", "")
    for size in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="^batch_size: got .* wants a whole number from 1"):
            ExitLatencies((1.0, 2.0), size, "", "")
    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(TypeError, match="network: got Sequential, wants an EarlyExitNetwork"):
        measure_exit_latencies(slow.backbone, slow, x)
    with pytest.raises(ValueError, match="rounds: got 0, wants a whole number of at least 1"):
        measure_exit_latencies(slow, slow, x, rounds=0)
    with pytest.raises(ValueError, match="x: got shape"):
        measure_exit_latencies(slow, slow, x[:0])


@given(seed=st.integers(0, 1000), share=st.floats(0.01, 1.0), heads=st.integers(1, 4))
def test_no_stricter_candidate_meets_the_budget(seed, share, heads):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(heads, 40, generator=generator)
    correct = torch.rand(heads + 1, 40, generator=generator) < 0.8
    work = [*torch.rand(heads, generator=generator).sort().values.tolist(), 1.0]
    path = threshold_path(scores, correct, [(0.0, 1.0)] * heads, [True] * heads)
    points = curve_of(path, ScoredSamples(scores, correct), [1.0] * heads, work, None)
    costs = [point.work for point in points]
    assert costs == sorted(costs, reverse=True), "from one candidate to the next no sample leaves later"
    chosen, bound = within_cost(points, costs, 40, share, 0.9, "{}")
    assert bound.reachable == (min(costs) <= share)
    assert costs[chosen] == min(costs) or costs[chosen] <= share
    assert all(cost > share for cost in costs[:chosen])


#: FLOPs of the trained network's three convolutions and its linear layer, for one image.
FLOPS = [2 * 64 * 9 * 8, 2 * 16 * 9 * 8 * 16, 2 * 4 * 9 * 16 * 32 + 2 * 128 * 10]
SHARES = [FLOPS[0] / sum(FLOPS), sum(FLOPS[:2]) / sum(FLOPS), 1.0]


def test_a_budget_of_work_takes_the_strictest_candidate_that_meets_it(network, held_out, without_interpreter):
    images, labels = digits()
    parts = {"temperature": range(250), "thresholds": range(250, 900), "test": range(900, 1297)}
    report = calibrate_network(network, held_out, max_work=0.6, splits=parts)
    assert report.bound.reachable and report.budget == {"max_work": 0.6} and report.curve[0].work == 1.0
    assert [row.work for row in report.exits] == SHARES and 0.0 < report.bound.max_accuracy_drop < 1.0

    def work_of(x):
        return sum(SHARES[exit_index] for exit_index in network(x).exit_index.tolist()) / len(x)

    assert report.expected_work == pytest.approx(work_of(images[1400:]))
    assert report.curve[report.chosen].work == pytest.approx(work_of(images[750:1400]))
    assert work_of(images[500:750]) <= 0.6, "on the split that candidates are made of"
    stricter = report.curve[report.chosen - 1].thresholds
    network.set_rules({tap: 1.0 if one is None else one for tap, one in zip(network.taps, stricter, strict=True)})
    assert work_of(images[500:750]) > 0.6
    below = calibrate_network(network, held_out, max_work=0.1, splits=parts)
    assert not below.bound.reachable and below.exits[0].share > 0.9
    said = f"the cheapest thresholds take {SHARES[0]:.3%} of the backbone's FLOPs on average, more than 10.000% of"
    assert below.bound.reason.startswith(said)
    free = calibrate_network(network, held_out, max_work=1.0, splits=parts)
    assert free.chosen == 0 and free.expected_work == 1.0 and free.bound.max_accuracy_drop == 0.0


def test_work_does_not_depend_on_budget_dtype_or_how_the_backbone_is_run(network, held_out, device):
    by_accuracy = calibrate_network(network, held_out, max_accuracy_drop=0.05)
    assert [row.work for row in by_accuracy.exits] == SHARES
    network.to(device, torch.bfloat16 if device == "cuda" else torch.float64).backbone.compile(backend="eager")
    wide = [(images.to(network.dtype), labels) for images, labels in held_out]
    assert [row.work for row in calibrate_network(network, wide, max_work=0.7).exits] == SHARES
