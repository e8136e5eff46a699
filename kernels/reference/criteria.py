"""Exit criteria: their names, the ranges of their thresholds, their definitions in PyTorch; checks of rules' numbers.

To add one: a row of ``CRITERIA`` with its definition here, the same in jit/criteria.py; if it has a state, what that is
at first in jit/decide.py, and in jit/slices.py of a slice and of all; a case in tests/kernels/test_criteria.py.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST, _LARGEST = torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max
#: Confidences of the answers of an exit are counted in so many bins of equal width from 0 to 1.
TALLY_BINS = 32


class Softmax(NamedTuple):
    """A softmax over classes, float32 or better, and what it was made of."""

    probs: Tensor  # [N, K]
    below: Tensor  # [N, K], the logits' distance from the largest one, divided by the temperature
    top: Tensor  # [N], the largest logit
    temperature: Tensor | float


class Criterion(NamedTuple):
    """What a head is sure by."""

    low: float
    high: float  # the closed range that a threshold may take. A sample exits when its confidence is strictly greater.
    confidence: Callable[[Softmax], Tensor]  # [N], larger where a head is surer; NaN where a probability is
    counts_heads: bool = False  # in a network the confidence is how many heads agree, earlier ones, too; see merge.py
    of_logits: bool = False  # the confidence is of the logits' size, whatever the temperature; else of logits over it

    @property
    def range(self) -> tuple[float, float]:
        """The range of thresholds."""
        return self.low, self.high


def _max_prob(softmax: Softmax) -> Tensor:
    return softmax.probs.amax(dim=-1)


def _entropy(softmax: Softmax) -> Tensor:
    """1 - H / log K: the entropy of BranchyNet (Teerapittayanon et al., 2016), normalised and turned round."""
    # a probability of 0 counts for nothing, and has no derivative
    log_probs = torch.log_softmax(softmax.below, dim=-1).masked_fill(softmax.probs == 0, 0.0)
    return 1.0 + (softmax.probs * log_probs).sum(dim=-1) / math.log(max(2, softmax.probs.shape[-1]))


def _margin(softmax: Softmax) -> Tensor:
    """The largest probability less the second largest, which is 0 if there is one class."""
    if softmax.probs.shape[-1] == 1:
        return _max_prob(softmax)
    first, second = softmax.probs.topk(2, dim=-1).values.unbind(-1)
    return first - second


def _patience(softmax: Softmax) -> Tensor:
    """1 of a head alone; in a network how many heads in a row agree, see merge.py."""
    return 1.0 + 0.0 * _max_prob(softmax)


def _energy(softmax: Softmax) -> Tensor:
    """Temperature * logsumexp(logits / temperature), less for unknown inputs (Liu et al., 2020: minus the energy)."""
    return (softmax.top + softmax.temperature * softmax.below.logsumexp(dim=-1)).clamp(max=_LARGEST)


#: Criteria by name. State_dicts hold the position of a criterion in this order: new ones go to the end.
CRITERIA: dict[str, Criterion] = {
    "max_prob": Criterion(0.0, 1.0, _max_prob),
    "entropy": Criterion(0.0, 1.0, _entropy),
    "margin": Criterion(0.0, 1.0, _margin),
    "energy": Criterion(-_LARGEST, _LARGEST, _energy, of_logits=True),
    "patience": Criterion(0.0, _LARGEST, _patience, counts_heads=True),
}


def number_of(criterion: str) -> int:
    """Return the position of a criterion in ``CRITERIA``."""
    return list(CRITERIA).index(criterion)


def check_criterion(criterion: str) -> None:
    """Raise ``ValueError`` unless ``criterion`` is a known one."""
    if not isinstance(criterion, str) or criterion not in CRITERIA:
        raise ValueError(f"criterion: got {criterion!r}, wants one of {sorted(CRITERIA)}")


def check_temperature(temperature: float) -> None:
    """Raise ``TypeError`` for no number, ``ValueError`` unless it is a finite float32 greater than 0."""
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature: got {temperature!r}, wants a number")
    if not _SMALLEST <= temperature <= _LARGEST:
        raise ValueError(f"temperature: got {temperature}, wants a finite float32 greater than 0")


def check_threshold(criterion: str, threshold: float) -> None:
    """Raise ``TypeError`` for no number, ``ValueError`` unless it lies in the range of ``criterion``."""
    low, high = CRITERIA[criterion].range
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"threshold: got {threshold!r}, wants a number")
    if not low <= threshold <= high:
        raise ValueError(f"threshold: got {threshold}, wants a number in [{low}, {high}] for criterion {criterion!r}")
