"""Budgets of latency and work: the strictest candidate that meets one, on hand-made samples, and what is refused."""

import pytest
import torch
from auxhead.model import calibrate_network
from auxhead.model.calibration.search import ScoredSamples, curve_of, within_cost
from auxhead.model.calibration.thresholds import threshold_path
from hypothesis import given
from hypothesis import strategies as st
from support.digits_network import digits


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
    network.to(device, torch.bfloat16 if device == "cuda" else torch.float64).backbone.compile()
    wide = [(images.to(network.dtype), labels) for images, labels in held_out]
    assert [row.work for row in calibrate_network(network, wide, max_work=0.7).exits] == SHARES
