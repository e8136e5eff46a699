"""Candidates for the thresholds: a path from strict to loose, made of samples that no bound is tested on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .thresholds import between, thresholds_at_error_rate

#: Rates of lost samples, alike for all heads, that the path goes through, up to all of them.
_RATES = 64
_LOWEST_RATE = 1e-3
#: Steps in which the path comes to the lowest rate that a head can show: a small split has no sample wrong there.
_STEPS = 24


def threshold_path(
    scores: Tensor, correct: Tensor, ranges: Sequence[tuple[float, float]], enabled: Sequence[bool]
) -> list[Tensor]:
    """Return threshold vectors in a fixed order, from no exit at all to everyone at the first enabled head.

    For a rate, each head takes the smallest threshold above which it loses at most such a share of the samples: those
    that the classifier is right about and it is not; see :func:`thresholds_at_error_rate`. Before the lowest rate that
    lets anybody go there are stricter candidates, under which each head lets its surest 1/24, 2/24, ... of those go.
    From one candidate to the next no sample leaves later.

    Args:
        scores: [E, M] float32.
        correct: [E + 1, M] bool; the last row is the classifier's.
        ranges: of each head the range of its scores.
        enabled: False for a head that is to let nobody go.

    Returns:
        Vectors [E] float32, all different.
    """
    never = torch.tensor([high for _, high in ranges])
    kept = correct[:-1] | ~correct[-1]
    path = [never]
    for number in range(_RATES):
        rate = _LOWEST_RATE ** (1 - number / (_RATES - 1))
        loosest = torch.where(torch.tensor(enabled), thresholds_at_error_rate(scores, kept, rate, ranges), never)
        for thresholds in [*_stricter(scores, loosest, never), loosest] if len(path) == 1 else [loosest]:
            if not torch.equal(thresholds, path[-1]):
                path.append(thresholds)
    return path


def _stricter(scores: Tensor, thresholds: Tensor, never: Tensor) -> list[Tensor]:
    """Return thresholds that let growing shares of those go that leave under ``thresholds``, all less than 1."""
    falling = scores.sort(1, descending=True).values
    leaving = (scores > thresholds[:, None]).sum(1).tolist()
    steps = []
    for step in range(1, _STEPS):
        found = never.clone()
        for head, count in enumerate(leaving):
            surest = count * step // _STEPS
            if surest:
                stays = falling[head, surest]
                leaves = falling[head, :surest]
                leaves = leaves[leaves > stays]  # equals stay together
                if len(leaves):
                    found[head] = between(stays, leaves[-1])
        steps.append(found)
    return steps
