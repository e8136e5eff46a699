"""Scores of logits: how sure each head is of each sample under its criterion and temperature; larger is surer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import CRITERIA
from ...kernels.patience import decide_in_order


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
    ranges = [CRITERIA[criterion].range for criterion in criteria]
    rules = [
        (temperature, high, criterion)
        for temperature, (_, high), criterion in zip(temperatures, ranges, criteria, strict=True)
    ]
    scores = [
        output.confidence.nan_to_num(nan=low).clamp(low, high)
        for output, (low, high) in zip(decide_in_order(logits, rules), ranges, strict=True)
    ]
    return torch.stack(scores)
