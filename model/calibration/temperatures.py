"""Temperatures of exits, fitted so that confidences are rates of right answers, and how far they are from that."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: The smallest and the largest temperature.
LEAST_HEAT = 0.01
MOST_HEAT = 100.0
#: Bins of confidence, of equal width, as Guo et al. have them.
BINS = 15
#: Halvings of the search: the logarithm of a temperature is then known to 1e-11.
_HALVINGS = 40


@dataclass(frozen=True)
class Reliability:
    """How often an exit is right when it says that it is so sure: a number for each of ``BINS`` bins of confidence."""

    samples: list[int]
    confidence: list[float | None]
    """Mean confidence of the bin's samples; None where there are none."""
    accuracy: list[float | None]
    """The share of them that the exit gets right."""
    ece: float
    """Expected calibration error: the mean of |accuracy - confidence| over the samples, 0 to 1."""


def fit_temperatures(logits: Tensor, labels: Tensor) -> Tensor:
    """Fit for each exit the temperature under which the labels are likeliest (Guo et al., ICML 2017, section 4.2).

    A small split of which an exit gets every sample right has no likeliest temperature, and one near 0 would round
    confidences to 1. So labels count as not quite certain, as Platt has them (Advances in Large Margin Classifiers,
    1999): of M labels, 1 / (M + 2) goes to all classes alike.

    The negative log-likelihood is convex in 1 / temperature, so that halving an interval finds where its slope, the
    mean logit under the probabilities less that under the labels, is 0; between ``LEAST_HEAT`` and ``MOST_HEAT``.

    Args:
        logits: [E, M, K] float, finite.
        labels: [M] int64.

    Returns:
        [E] float64.
    """
    logits = logits.double()
    doubt = 1 / (len(labels) + 2)
    of_labels = logits.gather(2, labels.expand(len(logits), -1)[..., None])[..., 0].mean(1)
    own = (1 - doubt) * of_labels + doubt * logits.mean((1, 2))  # [E]
    low = torch.full_like(own, LEAST_HEAT).log()
    high = torch.full_like(own, MOST_HEAT).log()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        probs = (logits / middle.exp()[:, None, None]).softmax(2)
        too_cold = (probs * logits).sum(2).mean(1) > own  # surer than the labels allow
        low, high = torch.where(too_cold, middle, low), torch.where(too_cold, high, middle)
    return ((low + high) / 2).exp()


def reliability(confidence: Tensor, correct: Tensor) -> Reliability:
    """Sort answers into bins of confidence.

    Args:
        confidence: [M] probabilities of the answers, 0 to 1.
        correct: [M] bool, true where an answer is right.
    """
    bins = (confidence.double() * BINS).ceil().clamp(1, BINS).long() - 1  # open below, closed above

    def sums(values: Tensor) -> Tensor:
        return torch.bincount(bins, values.double(), minlength=BINS)

    samples, sure, right = sums(torch.ones_like(bins)), sums(confidence), sums(correct)

    def means(total: Tensor) -> list[float | None]:
        return [one / count if count else None for one, count in zip(total.tolist(), samples.tolist(), strict=True)]

    ece = ((right - sure).abs().sum() / len(confidence)).item()
    return Reliability([int(count) for count in samples.tolist()], means(sure), means(right), ece)
