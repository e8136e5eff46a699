"""Thresholds of the demo from a validation split: accuracy kept, samples that leave."""

import math

import pytest
import torch
from auxhead.model.calibration.thresholds import exit_indices
from auxhead.model.commands.demo.experiment import choose_thresholds
from hypothesis import given, settings
from hypothesis import strategies as st


def early_exit_correct(confidence, correct, thresholds):
    """What a plain loop says: [M] bool, whether each picture is answered right."""
    right = []
    for m in range(confidence.shape[1]):
        leaves = [k for k, threshold in enumerate(thresholds) if confidence[k, m] > threshold]
        right.append(bool(correct[leaves[0] if leaves else -1, m]))
    return torch.tensor(right)


def shares(confidence, found):
    """The share of the samples that leaves at each exit."""
    exits = exit_indices(confidence, torch.tensor(found.thresholds))
    return (exits.bincount(minlength=len(confidence) + 1) / len(exits)).tolist()


@st.composite
def splits(draw):
    heads, pictures = draw(st.integers(1, 5)), draw(st.integers(1, 80))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    confidence = torch.rand(heads, pictures, generator=generator)
    steps = draw(st.sampled_from([None, 1, 3, 10]))  # None: hardly any ties
    if steps:
        confidence = (confidence * steps).round() / steps
    chance = torch.rand(heads + 1, 1, generator=generator).sqrt()
    follows = draw(st.booleans())
    correct = torch.rand(heads + 1, pictures, generator=generator) < (
        torch.cat([confidence, chance[-1:].expand(1, pictures)]) if follows else chance
    )
    return confidence, correct


@given(splits(), st.sampled_from([0.0, 0.005, 0.02, 0.1, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
def test_the_drop_is_never_more_than_allowed_on_the_validation_split(split, drop):
    confidence, correct = split
    found = choose_thresholds(confidence, correct, drop)
    right = early_exit_correct(confidence, correct, found.thresholds)
    assert found.accuracy == pytest.approx(right.double().mean().item())
    assert found.full_accuracy == pytest.approx(correct[-1].double().mean().item())
    assert found.full_accuracy - found.accuracy <= drop + 1e-9
    assert all(0.0 <= threshold <= 1.0 for threshold in found.thresholds)


#: Error rates in the order in which they are tried.
RATES = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32)


def threshold_by_loops(confidences, right, rate):
    """The smallest threshold above which a head is right often enough; equals leave together, and 0 never does."""
    ordered = sorted(zip(confidences, right, strict=True), reverse=True)
    threshold, answered_right = 1.0, 0
    for place, (lowest, is_right) in enumerate(ordered, start=1):
        answered_right += is_right
        below = ordered[place][0] if place < len(ordered) else None
        if lowest not in (below, 0.0) and (answered_right + 1) / (place + 2) >= 1.0 - rate:
            threshold = math.nextafter(lowest, 0.0) if below is None else (lowest + below) / 2
    return threshold


def calibrated_by_loops(confidence, correct, drop):
    """The exit index of each sample under the thresholds that ``choose_thresholds`` documents, in plain Python."""
    heads, samples = confidence.shape
    sure, right = confidence.tolist(), correct.tolist()

    def rule(rate, known):
        """One threshold a head, from the samples that are known."""
        return [
            threshold_by_loops([sure[k][m] for m in known], [right[k][m] for m in known], rate) for k in range(heads)
        ]

    def exit_of(sample, thresholds):
        return next((k for k in range(heads) if sure[k][sample] > thresholds[k]), heads)

    def exits_under(thresholds):
        return [exit_of(m, thresholds) for m in range(samples)]

    def lost_in_cross_validation(rate):
        lost = 0
        for fold in range(5):
            thresholds = rule(rate, [m for m in range(samples) if m % 5 != fold])
            for m in range(fold, samples, 5):
                lost += right[-1][m] and not right[exit_of(m, thresholds)][m]
        return lost

    needed = sum(right[-1]) - drop * samples - 1e-6
    best, earliest, held = [heads] * samples, heads * samples, []
    for rate in RATES:
        exits = exits_under(rule(rate, range(samples)))
        if sum(right[k][m] for m, k in enumerate(exits)) < needed or exits == [heads] * samples:
            continue
        held.append(exits)
        lost = lost_in_cross_validation(rate)
        if sum(exits) < earliest and lost <= drop * samples + 1e-6:
            earliest = sum(exits)
            best = held[max(0, len(held) - 3)] if lost else exits  # two rates stricter
    return best


@pytest.mark.parametrize(
    ("samples", "steps"), [(4, None), (11, 4), (45, None), (45, 15)], ids=["few", "many-ties", "no-ties", "ties"]
)
def test_samples_leave_as_a_plain_loop_says(samples, steps):
    """Cross-validation, two steps back, the correction for few samples and ties change one answer or more each."""
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        ability = torch.rand(3, 1, generator=generator) * 3 + 0.3
        confidence = torch.rand(3, samples, generator=generator) ** (1 / ability)
        if steps:
            confidence = (confidence * steps).round() / steps
        chance = torch.cat([confidence ** (0.6 * torch.rand(1, generator=generator)), torch.full((1, samples), 0.97)])
        correct = torch.rand(4, samples, generator=generator) < chance
        for drop in (0.02, 0.1):
            found = choose_thresholds(confidence, correct, drop)
            wanted = calibrated_by_loops(confidence, correct, drop)
            leaves = exit_indices(confidence, torch.tensor(found.thresholds)).tolist()
            assert leaves == wanted, (seed, drop, found)


def confident(*rates, pictures=400):
    """Heads right at these rates, sure of exactly what they have right."""
    correct = torch.arange(pictures) < torch.tensor([[round(rate * pictures)] for rate in rates])
    place = torch.linspace(0.0, 0.1, pictures)
    return torch.where(correct[:-1], 0.95 - place, 0.5 - place), correct


def test_a_head_that_is_right_where_it_is_sure_lets_those_leave():
    confidence, correct = confident(0.5, 1.0)
    found = choose_thresholds(confidence, correct, 0.0)
    assert shares(confidence, found) == pytest.approx([0.5, 0.5])
    assert 0.5 < found.thresholds[0] < 0.9
    assert found.accuracy == found.full_accuracy == 1.0


def test_certain_and_nan_confidences():
    confidence = torch.ones(1, 100)
    confidence[0, :10] = torch.nan
    found = choose_thresholds(confidence, torch.ones(2, 100, dtype=torch.bool), 0.005)
    assert found.thresholds[0] < 1.0
    assert shares(confidence, found) == pytest.approx([0.9, 0.1])


def test_neighbouring_floats_are_still_told_apart():
    low = torch.tensor(0.7)
    high = torch.nextafter(low, torch.tensor(1.0))
    right = torch.arange(400) < 300
    confidence = torch.where(right, high, low)[None]
    found = choose_thresholds(confidence, torch.stack([right, torch.ones(400, dtype=torch.bool)]), 0.005)
    assert shares(confidence, found) == pytest.approx([0.75, 0.25])
    assert found.thresholds[0] == low.item()


def test_a_confidence_that_was_rounded_above_1_exits_at_no_threshold_of_1():
    correct = torch.tensor([[False], [True]]).expand(2, 50)
    found = choose_thresholds(torch.full((1, 50), 1.004), correct, 0.0)
    assert found.thresholds == (1.0,) and found.accuracy == 1.0
