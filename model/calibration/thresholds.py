"""Thresholds and what they do: which exit each sample leaves at, and the smallest that keep an error rate."""

from collections.abc import Sequence

import torch
from torch import Tensor


def exit_indices(confidence: Tensor, thresholds: Tensor) -> Tensor:
    """Return the exit index of each sample, [M] int64: the first head with score > threshold, else E."""
    sure = torch.cat([confidence > thresholds[:, None], torch.ones(1, confidence.shape[1], dtype=torch.bool)])
    return sure.to(torch.uint8).argmax(dim=0)  # the first of equals


def thresholds_at_error_rate(
    scores: Tensor, correct: Tensor, error_rate: float, ranges: Sequence[tuple[float, float]]
) -> Tensor:
    """Return the smallest thresholds [E] above which each head's error rate is low enough.

    Args:
        scores: [E, M] float32, larger is surer; no NaN.
        correct: [E, M] bool, or more rows, which are passed over.
        error_rate: 0 to 1. A head's rate of being right is counted as (right + 1) / (samples + 2): a handful of
            samples that are right by luck proves little.
        ranges: of each head the range of its scores; the upper end, above which none is, never exits.
    """
    thresholds = torch.tensor([high for _, high in ranges])
    samples = torch.arange(1, scores.shape[1] + 1, dtype=torch.float64)  # [M], surer than each cut
    for head, unsorted in enumerate(scores):
        low = unsorted.new_tensor([ranges[head][0]])
        sure, order = unsorted.sort(descending=True, stable=True)
        right = correct[head, order].double().cumsum(0)
        enough = (right + 1) / (samples + 2) >= 1.0 - error_rate
        below = torch.cat([sure[1:], low])  # the first score that stays
        cuts = (enough & (sure > below)).nonzero()  # equals leave together
        if len(cuts):
            cut = int(cuts[-1])
            last = cut + 1 == len(sure)
            thresholds[head] = torch.nextafter(sure[cut], low[0]) if last else between(below[cut], sure[cut])
    return thresholds


def between(stays: Tensor, leaves: Tensor) -> Tensor:
    """Return a threshold half-way, that lets ``leaves`` exit and not ``stays``."""
    middle = ((stays.double() + leaves.double()) / 2).float()
    return middle if middle < leaves else stays
