"""Scores of logits: how sure each head is of each sample under its criterion and temperature; larger is surer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import CRITERIA, HeadOutput, decide
from ...kernels.patience import with_patience


def exit_scores(logits: Tensor, criteria: Sequence[str], temperatures: Sequence[float]) -> Tensor:
    """Return the scores that E heads compare with their thresholds; a sample exits where score > threshold.

    Args:
        logits: [E, M, K] float32, of the heads in the order in which they run.
        criteria: of each head.
        temperatures: of each head, a divisor of its logits.

    Returns:
        [E, M] float32, each head's within ``auxhead.kernels.CRITERIA[criterion]``; NaN, which never exits, is its lower
        end.
    """
    said: list[HeadOutput] = []
    scores = []
    for of_head, criterion, temperature in zip(logits, criteria, temperatures, strict=True):
        low, high, _ = CRITERIA[criterion]
        said.append(decide(of_head, temperature, high, criterion))
        if criterion == "patience":
            said[-1] = with_patience(said, high)
        scores.append(said[-1].confidence.nan_to_num(nan=low).clamp(low, high))
    return torch.stack(scores)
