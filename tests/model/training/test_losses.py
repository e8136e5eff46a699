"""Losses of all exits against their formulas in float64, and the settings of a training."""

import pytest
import torch
from auxhead.model import TrainingPlan, distillation_loss, joint_loss
from auxhead.model.training.plan import epochs_for, one_cycle

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


def test_smoothed_labels_give_a_part_to_all_classes():
    logits, part = exits(), 0.2
    shares = torch.full((len(LABELS), 5), part / 5, dtype=torch.float64)
    shares[torch.arange(len(LABELS)), LABELS] += 1.0 - part
    wanted = torch.stack([-(shares * log_softmax(one)).sum(1).mean() for one in logits])
    found = joint_loss(logits, LABELS, label_smoothing=part)
    torch.testing.assert_close(found.double(), wanted.mean(), rtol=1e-5, atol=0.0)
    without_teacher = distillation_loss(logits, LABELS, teacher_share=0.0, label_smoothing=part)
    torch.testing.assert_close(without_teacher, found)


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


def test_few_images_get_more_epochs():
    for images, batch_size, expected in ((1078, 32, 10), (100_000, 32, 10), (200, 32, 20), (2, 2, 100)):
        assert epochs_for(images, batch_size) == expected


def test_the_learning_rate_rises_to_the_top_and_falls():
    for steps in (1, 2, 3, 4, 5, 7, 8, 100):
        rates = [one_cycle(step, steps) for step in range(steps)]
        top = rates.index(1.0)
        assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
        assert all(0.0 < rate <= 1.0 for rate in rates)


def test_a_setting_out_of_its_range_or_of_another_type_is_named():
    for setting, value, error, message in (
        ("method", "both", ValueError, "method: got 'both', wants one of 'joint', 'heads', 'distill'"),
        ("precision", "fp8", ValueError, "precision: got 'fp8', wants one of 'float32', 'bfloat16', 'float16'"),
        ("epochs", 0, ValueError, "epochs: got 0, wants a whole number from 1"),
        ("accumulate", 1.5, ValueError, "accumulate: got 1.5"),
        ("patience", 0, ValueError, "patience: got 0"),
        ("learning_rate", 0.0, ValueError, "learning_rate: got 0.0, wants a positive number"),
        ("learning_rate", float("nan"), ValueError, "learning_rate: got nan"),
        ("temperature", -1.0, ValueError, "temperature: got -1.0"),
        ("weight_decay", -0.1, ValueError, "weight_decay: got -0.1"),
        ("teacher_share", 1.5, ValueError, "teacher_share: got 1.5, wants a number from 0 to 1"),
        ("learning_rate", "1", TypeError, "learning_rate: got .*, wants a number"),
        ("weights", 2.0, TypeError, "weights: got .*, wants a number"),
        ("weights", ("1", 2.0), TypeError, "weights: got .*, wants a number"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            TrainingPlan(**{setting: value})
