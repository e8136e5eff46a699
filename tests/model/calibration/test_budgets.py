"""Budgets of latency and work: the strictest candidate that meets one, on hand-made samples, and what is refused."""

import pytest
import torch
from auxhead.model import calibrate_network
from auxhead.model.calibration.exit_latency import ExitLatencies
from auxhead.model.calibration.search import Budget, ScoredSamples, curve_of, expected_work, one_budget, within_cost
from auxhead.model.calibration.thresholds import threshold_path
from hypothesis import given
from hypothesis import strategies as st
from support.digits_network import digits

WORK = (0.25, 0.5, 1.0)
#: Of four samples, by two heads; the classifier is right about all but the last.
SAMPLES = ScoredSamples(
    torch.tensor([[0.9, 0.2, 0.6, 0.1], [0.9, 0.8, 0.3, 0.2]]),
    torch.tensor([[True, True, False, True], [True, True, False, False], [True, True, True, False]]),
)
#: Nobody leaves; one at the first head; one more at the second; two and one; all but one at the first head.
PATH = [torch.tensor(one) for one in ([1.0, 1.0], [0.7, 1.0], [0.7, 0.5], [0.5, 0.5], [0.15, 0.5])]
COSTS = [1.0, 3.25 / 4, 2.75 / 4, 2.0 / 4, 1.75 / 4]


def curve():
    return curve_of(PATH, SAMPLES, [1.0, 1.0], WORK, None)


def test_work_is_that_of_the_exits():
    assert expected_work(torch.tensor([0, 1, 2, 2]), WORK) == (0.25 + 0.5 + 1 + 1) / 4
    assert [point.work for point in curve()] == COSTS
    assert [point.lost for point in curve()] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(("budget", "chosen"), [(1.0, 0), (0.99, 1), (3.25 / 4, 1), (0.5, 3), (0.49, 4)])
def test_the_strictest_candidate_that_meets_a_budget_is_chosen(budget, chosen):
    choice = within_cost(curve(), COSTS, 4, budget, 0.9, "{:.3%} of the FLOPs")
    assert choice.candidate == chosen and choice.bound.reachable and choice.bound.reason is None
    assert choice.bound.lost == [0, 0, 0, 1, 1][chosen] and (choice.bound.max_accuracy_drop > 0) == (chosen > 0)


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


def test_one_budget_is_taken_and_bad_ones_are_named():
    measured = ExitLatencies((1.0, 2.0), 1, "made up", "none")
    assert one_budget(0, None, None, None) == Budget("max_accuracy_drop", 0.0)
    assert one_budget(None, 3, None, measured) == Budget("max_latency_ms", 3.0)
    for asked, error, message in (
        ((None, None, None), ValueError, "max_accuracy_drop, max_latency_ms, max_work: got none, wants one of"),
        ((0.1, 2.0, 0.5), ValueError, ".*: got max_accuracy_drop and max_latency_ms and max_work, wants one"),
        ((None, None, 0.0), ValueError, "max_work: got 0.0, wants a share of the backbone's FLOPs in"),
        ((None, None, float("nan")), ValueError, "max_work: got nan, wants a share"),
        ((None, None, "half"), TypeError, "max_work: got 'half', wants a number"),
        ((None, None, True), TypeError, "max_work: got True, wants a number"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            one_budget(*asked, None)


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
