"""``anytime_curve``: budgeted batches as in a plain loop, and nothing chosen on the test split."""

import json
import math

import pytest
import torch
from auxhead.kernels import CRITERIA
from auxhead.model import ExitLatencies, ExitRule, anytime_curve
from auxhead.model.calibration.curve import shares_within, thresholds_for, wilson_interval
from auxhead.model.calibration.thresholds import exit_indices, fit_temperatures
from support.digits_network import batches, digits

pytestmark = pytest.mark.usefixtures("without_interpreter")
PARTS = {"temperature": range(250), "thresholds": range(250, 900), "test": range(900, 1297)}
LATENCIES = ExitLatencies((1.0, 2.0, 4.0), 4, "made up", "none")


def plain_shares(costs, budget):
    """Of exits as Huang et al. have them, z (1 - q)^(k - 1) q: of a fine grid of q the last whose cost is within."""
    found = None
    for step in range(20_000):
        ratio = math.tan(step / 20_000 * math.pi / 2)  # 1 - q, from 0 to far above 1
        shares = [ratio**place for place in range(len(costs))]
        total = sum(shares)
        if sum(share * cost for share, cost in zip(shares, costs, strict=True)) / total > budget:
            return found
        found = [share / total for share in shares]
    return found


def plain_thresholds(scores, shares):
    """Samples leave one by one, the surest first, with all that are as sure, until enough are gone."""
    count, gone, thresholds, wanted = len(scores[0]), set(), [], 0.0
    for own, share in zip(scores, shares, strict=False):
        wanted += share
        queue = sorted((i for i in range(count) if i not in gone), key=lambda i: -own[i])
        leaving = []
        while queue and share > 0 and (len(gone) + len(leaving) < round(wanted * count)):
            leaving.append(queue.pop(0))
            while queue and own[queue[0]] == own[leaving[-1]]:
                leaving.append(queue.pop(0))
        gone |= set(leaving)
        thresholds.append((own[queue[0]] if queue else -1.0, own[leaving[-1]]) if leaving else None)
    return thresholds, gone


@pytest.mark.parametrize("budget", [0.2, 0.35, 0.5, 0.9])
def test_shares_of_a_budget_are_those_of_the_paper(budget):
    costs = [0.2, 0.3, 0.6, 1.0]
    shares = shares_within(costs, budget)
    assert shares.tolist() == pytest.approx(plain_shares(costs, budget), abs=2e-3)
    assert sum(share * cost for share, cost in zip(shares.tolist(), costs, strict=True)) == pytest.approx(budget)


@pytest.mark.parametrize("digits_of_scores", [1, 6], ids=["ties", "all different"])
def test_thresholds_of_shares_are_those_of_a_plain_loop(digits_of_scores):
    generator = torch.Generator().manual_seed(3)
    scores = (torch.rand(3, 83, generator=generator) * 10**digits_of_scores).round() / 10**digits_of_scores
    shares = torch.tensor([0.3, 0.0, 0.4, 0.3], dtype=torch.float64)
    found = thresholds_for(scores, shares, [(0.0, 1.0)] * 3)
    wanted, gone = plain_thresholds(scores.tolist(), shares.tolist())
    assert wanted[1] is None and found[1] == 1.0, "nobody leaves where nobody is to"
    for threshold, between in zip(found.tolist(), wanted, strict=True):
        assert between is None or between[0] <= threshold < between[1]
    assert {place for place, left in enumerate(exit_indices(scores, found).tolist()) if left < 3} == gone


@pytest.mark.parametrize("criterion", ["max_prob", "patience"])
def test_the_network_answers_as_the_points_say_and_stays_as_it_is(network, held_out, criterion):
    network.set_rules(ExitRule(0.7, criterion=criterion))
    before = [repr(head.rule) for head in network.exit_heads]
    report = anytime_curve(network, held_out, splits=PARTS, latencies=LATENCIES)
    assert [repr(head.rule) for head in network.exit_heads] == before and network.learned_from is None
    images, labels = (part[1400:] for part in digits())
    flops = [2 * 64 * 9 * 8, 2 * 16 * 9 * 8 * 16, 2 * 4 * 9 * 16 * 32 + 2 * 128 * 10]
    assert report.flops == sum(flops) and [one.work for one in report.exits[:1]] == [flops[0] / sum(flops)]
    with torch.no_grad():
        alone = [(logits.argmax(1) == labels).double().mean().item() for logits in network.logits(images)]
    assert [one.accuracy for one in report.exits] == pytest.approx(alone)
    path, budgeted = report.alone.path, report.alone.budgeted
    assert path[0].accuracy == budgeted[-1].accuracy == report.exits[-1].accuracy and path[0].latency_ms == 4.0
    if criterion == "patience":
        return
    assert all(later.work <= earlier.work for earlier, later in zip(path, path[1:], strict=False))
    assert [one.budget for one in budgeted] == pytest.approx([step / 20 for step in range(3, 21)])
    assert all(one.work == pytest.approx(one.budget, abs=0.06) for one in budgeted), "as far as another split tells"
    temperatures = temperatures_of(network, images=digits()[0][500:750], labels=digits()[1][500:750])
    for point in (path[len(path) // 2], budgeted[8]):
        for head, threshold, temperature in zip(network.exit_heads, point.thresholds, temperatures, strict=False):
            high = CRITERIA[criterion].high
            head.rule.assign(ExitRule(high if threshold is None else threshold, temperature=temperature))
        answer = network(images)
        assert point.accuracy == pytest.approx((answer.label == labels).double().mean().item())
        assert point.shares == pytest.approx((torch.bincount(answer.exit_index, minlength=3) / len(labels)).tolist())
        assert point.interval[0] < point.accuracy < point.interval[1]


def temperatures_of(network, images, labels):
    with torch.no_grad():
        return fit_temperatures(torch.stack(network.logits(images)), labels).tolist()


def test_nothing_is_chosen_on_the_test_split(network, held_out):
    report = anytime_curve(network, held_out, splits=PARTS)
    images, labels = (part[500:] for part in digits())
    wrong = torch.cat([labels[:900], (labels[900:] + 1) % 10])
    other = anytime_curve(network, batches(images, wrong), splits=PARTS)
    for way in ("path", "budgeted"):
        points, again = getattr(report.alone, way), getattr(other.alone, way)
        assert [one.thresholds for one in points] == [one.thresholds for one in again]
        assert [one.shares for one in points] == [one.shares for one in again]
        assert all(one.accuracy < point.accuracy for one, point in zip(again, points, strict=True))
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    assert "It may have learned from these samples: nothing was noted" in str(report)


def test_a_head_that_is_not_enabled_lets_nobody_go(network, held_out):
    network.set_rules({"0": ExitRule(0.5, enabled=False)})
    alone = anytime_curve(network, held_out, splits=PARTS).alone
    assert all(one.shares[0] == 0.0 and one.thresholds[0] is None for one in (*alone.path, *alone.budgeted))
    assert alone.budgeted[0].budget == 0.55, "the second exit takes 54 %"


def test_intervals_are_wilsons():
    assert wilson_interval(0.9, 100, 0.95) == pytest.approx([0.8256, 0.9448], abs=1e-4)
    low, high = wilson_interval(1.0, 20, 0.9)
    assert high == pytest.approx(1.0) and high <= 1.0 and 0.8 < low < 1.0


def test_bad_arguments_are_those_of_a_calibration(network, held_out):
    with pytest.raises(TypeError, match="network: got Sequential, wants an EarlyExitNetwork"):
        anytime_curve(network.backbone, held_out)
    with pytest.raises(ValueError, match="confidence: got 1, wants a number between 0 and 1"):
        anytime_curve(network, held_out, confidence=1)
    with pytest.raises(ValueError, match="splits: temperature and test share 1 samples"):
        anytime_curve(network, held_out, splits={**PARTS, "test": range(249, 300)[:1]})
