"""Settings of a training: their ranges, epochs by the number of images, and the schedule."""

import pytest
from auxhead.model import TrainingPlan
from auxhead.model.training.plan import epochs_for, one_cycle


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
