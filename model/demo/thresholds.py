"""Thresholds of the demo: samples of a small validation split leave as early as a given loss of accuracy allows.

Nothing is proven about other samples: a bound as that of ``calibrate_network`` takes more than the demo has.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.criteria import CRITERIA
from ..calibration.thresholds import exit_indices, thresholds_at_error_rate

#: Error rates that the search tries, each for all heads alike.
_ERROR_RATES = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32)

#: The choice is this many rates stricter than the best one.
_STEPS_BACK = 2

#: Folds of the cross-validation.
_FOLDS = 5


class ChosenThresholds(NamedTuple):
    """Thresholds for E heads, and the accuracies on the samples that they were chosen on, 0 to 1."""

    thresholds: tuple[float, ...]
    """One for each head, a float32 value; 1.0 never exits."""
    accuracy: float
    """Of early exit."""
    full_accuracy: float
    """Of the classifier alone."""


def choose_thresholds(confidence: Tensor, correct: Tensor, max_accuracy_drop: float) -> ChosenThresholds:
    """Choose a ``max_prob`` threshold for each head.

    For an error rate, each head takes the smallest threshold that keeps it (:func:`thresholds_at_error_rate`). All
    samples count, not only those that earlier heads leave for it: these are few. A head that cannot gets 1.0.

    Of several rates, the one is taken under which samples leave earliest (by the mean of their exit indices) while
    accuracy drops by at most ``max_accuracy_drop``: on the split itself, which always holds for the result, and in
    five-fold cross-validation. The best of several still fits accidents of a small split: if it loses samples in
    cross-validation, the result is two rates stricter (one, if no head would exit otherwise), in the spirit of the
    one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984). If no rate will do, no head
    exits.

    Args:
        confidence: [E, M] float32, of each head, 0 to 1; NaN never exits.
        correct: [E + 1, M] bool, true where a head or, last, the classifier is right; both on the CPU.
        max_accuracy_drop: 0.005 is half a percentage point.
    """
    confidence = confidence.nan_to_num(nan=0.0).clamp(max=1.0)
    heads, samples = confidence.shape
    needed = int(correct[-1].sum()) - max_accuracy_drop * samples - 1e-6  # samples that must be answered right
    best = torch.ones(heads)
    earliest = nobody_leaves = float(heads)
    stricter: list[Tensor] = []  # candidates that hold and let some samples leave, the strictest first
    for rate in _ERROR_RATES:
        candidate = _at_error_rate(confidence, correct, rate)
        exits = exit_indices(confidence, candidate)
        mean_exit = exits.double().mean().item()
        if _right(correct, exits) < needed or mean_exit == nobody_leaves:
            continue
        stricter.append(candidate)
        held_out = _lost_held_out(confidence, correct, rate)
        if mean_exit < earliest and held_out <= max_accuracy_drop * samples + 1e-6:
            earliest = mean_exit
            best = stricter[-1 - _STEPS_BACK :][0] if held_out else candidate
    accuracy = _right(correct, exit_indices(confidence, best)) / samples
    return ChosenThresholds(tuple(best.tolist()), accuracy, int(correct[-1].sum()) / samples)


def _at_error_rate(confidence: Tensor, correct: Tensor, rate: float) -> Tensor:
    return thresholds_at_error_rate(confidence, correct, rate, [CRITERIA["max_prob"].range] * len(confidence))


def _right(correct: Tensor, exits: Tensor) -> int:
    return int(correct.gather(0, exits[None]).sum())


def _lost_held_out(confidence: Tensor, correct: Tensor, error_rate: float) -> int:
    """Count, in cross-validation, the samples that the classifier gets right and early exit gets wrong.

    Samples that only a head gets right do not make up for them: on another split they may not be there.
    """
    fold = torch.arange(confidence.shape[1]) % _FOLDS
    lost = 0
    for held_out in range(_FOLDS):
        own = fold == held_out
        exits = exit_indices(confidence[:, own], _at_error_rate(confidence[:, ~own], correct[:, ~own], error_rate))
        lost += int((correct[-1, own] & ~correct[:, own].gather(0, exits[None])[0]).sum())
    return lost
