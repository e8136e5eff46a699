"""Settings of a training: their ranges, epochs by the number of images, and the schedule."""

import pytest
from auxhead.model import TrainingPlan
from auxhead.model.training.plan import epochs_for, one_cycle


@pytest.mark.parametrize(
    ("images", "batch_size", "expected"), [(1078, 32, 10), (100_000, 32, 10), (200, 32, 20), (2, 2, 100)]
)
def test_few_images_get_more_epochs(images, batch_size, expected):
    assert epochs_for(images, batch_size) == expected


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 7, 8, 100])
def test_the_learning_rate_rises_to_the_top_and_falls(steps):
    rates = [one_cycle(step, steps) for step in range(steps)]
    top = rates.index(1.0)
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert all(0.0 < rate <= 1.0 for rate in rates)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("method", "both", "method: got 'both', wants one of 'joint', 'heads', 'distill'"),
        ("precision", "fp8", "precision: got 'fp8', wants one of 'float32', 'bfloat16', 'float16'"),
        ("epochs", 0, "epochs: got 0, wants a whole number from 1"),
        ("accumulate", 1.5, "accumulate: got 1.5"),
        ("patience", 0, "patience: got 0"),
        ("learning_rate", 0.0, "learning_rate: got 0.0, wants a positive number"),
        ("learning_rate", float("nan"), "learning_rate: got nan"),
        ("temperature", -1.0, "temperature: got -1.0"),
        ("weight_decay", -0.1, "weight_decay: got -0.1"),
        ("teacher_share", 1.5, "teacher_share: got 1.5, wants a number from 0 to 1"),
    ],
)
def test_a_setting_out_of_its_range_is_named(setting, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        TrainingPlan(**{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"), [("learning_rate", "1"), ("weight_decay", None), ("weights", 2.0), ("weights", ("1", 2.0))]
)
def test_a_setting_of_another_type_is_named(setting, value):
    with pytest.raises(TypeError, match=f"^{setting}: got .*, wants a number"):
        TrainingPlan(**{setting: value})
