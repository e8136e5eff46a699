"""The eager truth: answers within rounding of another, truths under changing rules, and the comparison with them."""

import copy

import pytest
import torch
from auxhead.autotune.measuring.eager_truth import (
    Comparison,
    EagerTruth,
    Expected,
    Rounding,
    measure_rounding,
    truth_of_logits,
    wrong_in_words,
)
from auxhead.model import EarlyExitNetwork, ExitResult, ExitRule, FusedAuxHead, make_trunk
from support.example_models import SmallNet, plain_heads


def test_truth_says_what_lies_within_rounding():
    head = FusedAuxHead(4, 2, rule=0.75)
    logits = torch.tensor([[5.0, 0.0], [1.0986, 0.0], [0.0, 0.0], [0.0, 0.0]])  # 0.993, 0.75, 0.5, 0.5
    last = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 1.001], [0.0, 1.0]])
    truth = truth_of_logits([logits, last], [head], Rounding([1e-3, 1e-3], [1e-3, 1e-3]))
    assert truth.answer.label.tolist() == [0, 1, 1, 1] and truth.answer.exit_index.tolist()[0::2] == [0, 1]
    assert truth.near.tolist() == [False, True, True, False]
    assert truth.possible.tolist() == [[True, False], [False, True], [True, True], [False, True]]
    never = FusedAuxHead(4, 2, rule=1.0)  # a confidence close to 1.0 is not near a threshold that nothing exceeds
    sure = torch.tensor([[50.0, 0.0]])
    assert not truth_of_logits([sure, sure], [never], Rounding([1e-3] * 2, [1e-3] * 2)).near.any()


def test_rounding_is_the_largest_error_of_an_exit_over_the_inputs(without_interpreter):
    inputs = [scale * torch.randn(4, 3, 8, 8) for scale in (1.0, 30.0, 0.1)]
    rule = ExitRule(0.5, temperature=5.0)
    network = EarlyExitNetwork(SmallNet(), plain_heads(), rule, example_input=inputs[0]).eval()
    exact, eps = copy.deepcopy(network).double(), 2.0 * torch.finfo(torch.float32).eps
    wanted = [[0.0] * 4, [0.0] * 4]
    with torch.no_grad():
        for x in inputs:
            pairs = zip(network.logits(x), exact.logits(x.double()), strict=True)
            for index, (own, right) in enumerate(pairs):
                off = (own.double() - right).abs().max() + eps * right.abs().max()
                wanted[0][index] = max(wanted[0][index], float(off))
                heat = 5.0 if index < 3 else 1.0
                own, right = (torch.softmax(one.double() / heat, 1).amax(1) for one in (own, right))
                wanted[1][index] = max(wanted[1][index], float((own - right).abs().max()) + eps)
    found = measure_rounding(network, inputs)
    assert found.logit == pytest.approx(wanted[0], rel=1e-6) and found.confidence == pytest.approx(wanted[1], rel=1e-6)


def test_truths_follow_the_rules_and_every_wrong_answer_is_counted(without_interpreter):
    network = EarlyExitNetwork(SmallNet(), plain_heads(), example_input=torch.randn(2, 3, 16, 16)).eval()
    inputs = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    truth = EagerTruth(network, make_trunk(network.backbone, network.taps, inputs[0]), inputs)
    assert truth.samples_by_exit() == {"block0": 0, "block1": 0, "block2": 0, "classifier": 12}
    network.fused_heads[1].rule.threshold = 0.0
    assert truth.samples_by_exit() == {"block0": 0, "block1": 12, "block2": 0, "classifier": 0}
    right, shifted = Comparison(), Comparison()
    truth.compare(network, right)
    truth.compare(lambda x: network(x.flip(0)), shifted, inputs=2)
    assert wrong_in_words(right.counts()) is None and right.counts()["samples"] == 12
    assert wrong_in_words(shifted.counts()) is not None and shifted.counts()["samples"] == 8
    known = truth.truths()
    network.fused_heads[1].rule.enabled = False
    assert truth.truths() is not known and truth.samples_by_exit()["classifier"] == 12
    network.fused_heads[1].rule.enabled = True
    assert truth.truths() is known
    network.fused_heads[1].rule.temperature = 3.0
    colder = torch.cat([one.answer.confidence for one in known])
    assert (torch.cat([one.answer.confidence for one in truth.truths()]) < colder).all()


def test_comparison():
    right = ExitResult(torch.tensor([1, 2, 3, 0]), torch.full((4,), 0.5).double(), None, torch.tensor([0, 0, 1, 1]))
    possible = torch.eye(4, dtype=torch.bool)[right.label]
    possible[1, 0] = True  # the second sample's label may be 0 as well, the third may leave elsewhere
    truth = Expected(right, torch.tensor([False, False, True, False]), possible, torch.full((4,), 0.01))

    def counts(**changes):
        comparison = Comparison()
        comparison.add(right, truth)
        comparison.add(right._replace(**changes), truth)
        return comparison.counts()

    fine = counts(label=torch.tensor([1, 0, 3, 0]), exit_index=torch.tensor([0, 0, 0, 1]))
    assert fine == {"samples": 8, "differing": 2, "differing_near": 2, "near": 4, "confidence_off": 0}
    assert wrong_in_words(fine) is None
    elsewhere = counts(exit_index=torch.tensor([0, 0, 0, 1]), confidence=torch.tensor([0.5, 0.5, 0.9, 0.5]).double())
    assert elsewhere["confidence_off"] == 0, "of another exit, whose confidence is another"
    assert wrong_in_words(counts(label=torch.tensor([0, 2, 3, 0]))).startswith("answers differ")
    assert "1 of 8" in wrong_in_words(counts(label=torch.tensor([1, 3, 3, 0])))
    assert "1 of 8" in wrong_in_words(counts(label=torch.tensor([1, 2, 3, 4])))
    assert "1 of 8" in wrong_in_words(counts(exit_index=torch.tensor([0, 0, 1, 0])))
    for wrong in (0.52, float("nan")):
        off = counts(confidence=torch.tensor([0.5, 0.5, 0.5, wrong]).double())
        assert off["confidence_off"] == 1 and wrong_in_words(off).startswith("confidences differ")
    assert wrong_in_words(Comparison().counts()) == "nothing was compared"
    with pytest.raises(ValueError, match=r"answers for \(3,\) samples"):
        Comparison().add(right._replace(label=right.label[:3]), truth)
