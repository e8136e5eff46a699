"""The eager truth: answers within rounding of another, and truths under changing rules."""

import torch
from auxhead.autotune.measuring.correctness import Answer, Comparison, verdict
from auxhead.autotune.measuring.eager_truth import EagerTruth, Rounding, truth_of_logits
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_trunk
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


def test_truths_follow_the_rules_and_every_wrong_answer_is_counted(without_interpreter):
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), plain_heads(), example_input=torch.randn(2, 3, 16, 16)).eval()
    inputs = [torch.randn(4, 3, 16, 16) for _ in range(3)]
    truth = EagerTruth(network, make_trunk(network.backbone, network.taps, inputs[0]), inputs)
    assert truth.samples_by_exit() == {"block0": 0, "block1": 0, "block2": 0, "classifier": 12}
    network.fused_heads[1].rule.threshold = 0.0
    assert truth.samples_by_exit(samples=10) == {"block0": 0, "block1": 10, "block2": 0, "classifier": 0}
    right, shifted = Comparison(), Comparison()
    truth.compare(lambda x: Answer.of(network(x)), right)
    truth.compare(lambda x: Answer.of(network(x.flip(0))), shifted, inputs=2)
    assert verdict(right.counts()) is None and right.counts()["samples"] == 12
    assert verdict(shifted.counts()) is not None and shifted.counts()["samples"] == 8
    known = truth.truths()
    network.fused_heads[1].rule.enabled = False
    assert truth.truths() is not known and truth.samples_by_exit()["classifier"] == 12
    network.fused_heads[1].rule.enabled = True
    assert truth.truths() is known
