"""Losses of all exits against their formulas in float64."""

import pytest
import torch
from auxhead.model import distillation_loss, joint_loss

LABELS = torch.tensor([0, 3, 2, 1, 4, 4, 0])


def exits(count=3):
    return [(3.0 * torch.randn(len(LABELS), 5)).requires_grad_() for _ in range(count)]


def log_softmax(logits):
    wide = logits.detach().double()
    return wide - wide.exp().sum(1, keepdim=True).log()


def cross_entropy(logits):
    return -log_softmax(logits)[torch.arange(len(LABELS)), LABELS].mean()


@pytest.mark.parametrize("weights", [None, (1.0, 0.0, 3.0)], ids=["same", "weighted"])
def test_the_joint_loss_is_the_weighted_mean_of_the_cross_entropies(weights):
    logits = exits()
    shares = torch.tensor(weights or (1.0, 1.0, 1.0), dtype=torch.float64)
    wanted = (torch.stack([cross_entropy(one) for one in logits]) * shares / shares.sum()).sum()
    torch.testing.assert_close(joint_loss(logits, LABELS, weights).double(), wanted, rtol=1e-5, atol=0.0)


def test_an_exit_of_weight_0_learns_nothing():
    logits = exits()
    joint_loss(logits, LABELS, (1.0, 0.0, 1.0)).backward()
    assert not logits[1].grad.any() and logits[0].grad.any() and logits[2].grad.any()


@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 2.0)], ids=["same", "weighted"])
def test_the_distillation_loss_is_that_of_its_formula(weights):
    logits, temperature, share = exits(), 2.5, 0.3
    teacher = log_softmax(logits[-1] / temperature)
    wanted = []
    for one in logits[:-1]:
        student = log_softmax(one / temperature)
        divergence = (teacher.exp() * (teacher - student)).sum(1).mean()
        wanted.append((1 - share) * cross_entropy(one) + share * temperature**2 * divergence)
    wanted.append(cross_entropy(logits[-1]))
    shares = torch.tensor(weights or (1.0, 1.0, 1.0), dtype=torch.float64)
    found = distillation_loss(logits, LABELS, weights, temperature=temperature, teacher_share=share)
    total = (torch.stack(wanted) * shares / shares.sum()).sum()
    torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=0.0)


def test_the_teacher_learns_from_the_labels_alone():
    logits = exits()
    distillation_loss(logits, LABELS, teacher_share=1.0).backward()
    alone = logits[-1].detach().clone().requires_grad_()
    joint_loss([alone], LABELS).backward()
    torch.testing.assert_close(logits[-1].grad, alone.grad / 3)
    assert logits[0].grad.any()


def test_a_teacher_without_a_share_says_nothing():
    logits = exits()
    torch.testing.assert_close(distillation_loss(logits, LABELS, teacher_share=0.0), joint_loss(logits, LABELS))


def test_half_precision_is_summed_in_float32():
    logits = [one.half() for one in exits()]
    for loss in (joint_loss, distillation_loss):
        found = loss(logits, LABELS)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, loss([one.float() for one in logits], LABELS))


@pytest.mark.parametrize("weights", [(1.0,), (0.0, 0.0, 0.0), (1.0, -1.0, 1.0), (1.0, float("nan"), 1.0)])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(ValueError, match="^weights: got .*wants 3, one an exit"):
        joint_loss(exits(), LABELS, weights)
