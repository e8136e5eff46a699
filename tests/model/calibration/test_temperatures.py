"""Temperatures are those of the method, and reliability counts what it says."""

import pytest
import torch
from auxhead.model.calibration.thresholds import BINS, fit_temperatures, reliability


def sampled(temperature, samples=4000, classes=5, seed=0):
    """Logits, and labels drawn from their softmax at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(samples, classes, generator=generator)
    labels = torch.multinomial((logits / temperature).softmax(1), 1, generator=generator)[:, 0]
    return logits, labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_labels_were_drawn_with_is_found(temperature):
    logits, labels = sampled(temperature)
    both = fit_temperatures(torch.stack([logits, 4 * logits]), labels)  # each exit has its own
    assert both.tolist() == pytest.approx([fit_temperatures(logits[None], labels).item(), 4 * both[0].item()])
    assert fit_temperatures(logits[None], labels).item() == pytest.approx(temperature, rel=0.1)


def test_no_temperature_beside_it_makes_the_labels_likelier():
    logits, labels = sampled(2.0)
    found = fit_temperatures(logits[None], labels).item()

    def loss(temperature):
        log_probs = (logits.double() / temperature).log_softmax(1)
        doubt = 1 / (len(labels) + 2)
        own = log_probs.gather(1, labels[:, None])[:, 0]
        return -((1 - doubt) * own + doubt * log_probs.mean(1)).mean().item()

    assert loss(found) < min(loss(0.99 * found), loss(1.01 * found))


def test_an_exit_that_is_always_right_keeps_confidences_below_1():
    labels = torch.arange(60) % 3
    logits = 2.0 * torch.nn.functional.one_hot(labels, 3).float()
    temperature = fit_temperatures(logits[None], labels).item()
    confidence = (logits / temperature).softmax(1).amax(1)
    assert 0.95 < confidence.min() and confidence.max() < 0.9999


def test_reliability_of_a_few_answers():
    confidence = torch.tensor([0.05, 0.9, 0.9, 0.9, 0.9, 1.0])
    correct = torch.tensor([False, True, True, True, False, True])
    found = reliability(confidence, correct)
    assert len(found.samples) == BINS and sum(found.samples) == 6
    place = found.samples.index(4)
    assert place == 13  # of 15: from 0.867 to 0.933
    assert found.confidence[place] == pytest.approx(0.9) and found.accuracy[place] == 0.75
    assert found.confidence[5] is None and found.accuracy[5] is None
    assert found.ece == pytest.approx((1 * 0.05 + 4 * 0.15 + 0) / 6)
