"""Scores of logits: how sure each head is of each sample under its criterion and temperature; larger is surer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import decide


def exit_scores(logits: Tensor, criteria: Sequence[str], temperatures: Sequence[float]) -> Tensor:
    """Return the scores that E heads compare with their thresholds; a sample exits where score > threshold.

    Args:
        logits: [E, M, K] float32, of the heads in the order in which they run.
        criteria: of each head.
        temperatures: of each head, a divisor of its logits.

    Returns:
        [E, M] float32, each head's within ``auxhead.kernels.CRITERIA[criterion]``; NaN, which never exits, is its lower
        end.

    Raises:
        ValueError: a criterion whose scores are not known here.
    """
    scores = []
    for index, (criterion, temperature) in enumerate(zip(criteria, temperatures, strict=True)):
        if criterion != "max_prob":
            raise ValueError(f"criteria[{index}]: got {criterion!r}, wants 'max_prob'")
        confidence = decide(logits[index], temperature=temperature, threshold=1.0).confidence
        scores.append(confidence.nan_to_num(nan=0.0).clamp(max=1.0))
    return torch.stack(scores)
