"""The eager truth under every criterion, patience and module heads included: plain loops and the network agree."""

import math

import pytest
import torch
from auxhead.autotune.measuring.eager_truth import (
    EagerTruth,
    Rounding,
    measure_rounding,
    truth_of_logits,
)
from auxhead.kernels import CRITERIA
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead, make_trunk
from support.example_models import SmallNet, mixed_heads, plain_heads

ROUNDING = Rounding([0.01, 0.02, 0.04, 0.01], [0.003, 0.006, 0.012, 0.003])
#: A threshold under which some samples leave, of logits of the test below.
THRESHOLDS = {"max_prob": 0.8, "entropy": 0.4, "margin": 0.5, "energy": 3.0, "patience": 1.0}


def confidence(own, temperature, criterion):
    """How sure a head is by its logits, patience aside."""
    exps = [math.exp((one - max(own)) / temperature) for one in own]
    probs = sorted((one / sum(exps) for one in exps), reverse=True)
    return {
        "max_prob": probs[0],
        "margin": probs[0] - probs[1],
        "entropy": 1 + sum(one * math.log(one) for one in probs) / math.log(len(probs)),
        "energy": max(own) + temperature * math.log(sum(exps)),
    }[criterion]


def truth_by_loops(logits, rules, rounding):
    """What the truth documents, sample by sample; in patience a tie of labels so far may change the count."""
    found = []
    for sample in range(len(logits[0])):
        near = undecided = False
        labels = []
        for index, at_exit in enumerate(logits):
            own = at_exit[sample].tolist()
            labels.append(own.index(max(own)))
            tied = [max(own) - one <= 4 * rounding.logit[index] for one in own]
            slack = 4 * rounding.confidence[index]
            if index == len(rules):
                sure = confidence(own, 1.0, "max_prob")
                break
            criterion, temperature, threshold = rules[index]
            undecided |= sum(tied) > 1
            if criterion == "patience":
                sure = next((back for back, one in enumerate(reversed(labels)) if one != labels[-1]), len(labels))
                near |= undecided
                slack = index if undecided else 0.0
            else:
                sure = confidence(own, temperature, criterion)
                near |= abs(sure - threshold) <= slack
            if sure > threshold:
                break
        found.append((labels[-1], sure, index, near, tied, slack))
    return found


@pytest.mark.parametrize("criteria", [*([one] * 3 for one in CRITERIA), ["margin", "patience", "energy"]], ids="-".join)
def test_truths_are_those_of_a_plain_loop(criteria):
    generator = torch.Generator().manual_seed(0)
    logits = [2 * torch.randn(200, 3, generator=generator) for _ in range(4)]
    rules = [(one, 0.5 + index, THRESHOLDS[one]) for index, one in enumerate(criteria)]
    heads = [FusedAuxHead(4, 3, rule=ExitRule(threshold, criterion=criterion, temperature=heat))
             for criterion, heat, threshold in rules]  # fmt: skip
    rules = [(*rule[:2], head.rule.threshold_tensor.item()) for rule, head in zip(rules, heads, strict=True)]
    truth, wanted = truth_of_logits(logits, heads, ROUNDING), truth_by_loops(logits, rules, ROUNDING)
    label, sure, exit_index, near, possible, slack = zip(*wanted, strict=True)
    assert truth.answer.label.tolist() == list(label) and truth.answer.exit_index.tolist() == list(exit_index)
    assert truth.answer.confidence.tolist() == pytest.approx(sure, rel=1e-9)
    assert truth.near_threshold.tolist() == list(near) and truth.possible.tolist() == list(possible)
    assert truth.slack.tolist() == pytest.approx(slack)
    assert 0 < sum(near) < 100 and len(set(exit_index)) > 1


def test_truths_follow_a_criterion_that_is_assigned(without_interpreter):
    x = torch.randn(8, 3, 16, 16)
    network = EarlyExitNetwork(SmallNet(), plain_heads(), 0.9785, example_input=x).eval()
    truth = EagerTruth(network, make_trunk(network.backbone, network.taps, x), [x])
    by_probability = truth.truths()
    network.set_rules({"block0": ExitRule(0.9785, criterion="margin")})
    (by_margin,) = truth.truths()
    answer = network(x)
    assert by_margin.answer.exit_index.tolist() == answer.exit_index.tolist()
    assert by_margin.answer.exit_index.tolist() != by_probability[0].answer.exit_index.tolist()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_rounding_is_that_of_the_criterion(criterion, without_interpreter):
    inputs = [scale * torch.randn(4, 3, 8, 8) for scale in (1.0, 30.0)]
    network = EarlyExitNetwork(SmallNet(), mixed_heads(), ExitRule(criterion=criterion), example_input=inputs[0]).eval()
    found = measure_rounding(network, inputs)
    assert len(found.logit) == len(found.confidence) == 4 and found.confidence[-1] < 1e-4
    if criterion == "patience":
        assert found.confidence[:3] == [0.0] * 3, "a count is right or another, as labels are"
    elif criterion == "energy":
        # of the size of logits, which are large here, and so is their rounding
        pairs = zip(found.logit[:3], found.confidence[:3], strict=True)
        assert all(0.1 * logit < sure <= 2 * logit for logit, sure in pairs)
    else:
        assert all(0 < sure < 1e-3 for sure in found.confidence[:3])
