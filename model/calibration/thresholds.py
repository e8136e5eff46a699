"""Chooses thresholds on a validation split: samples leave as early as a given loss of accuracy allows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.criteria import CRITERIA
from ..arguments import kind_of

#: Error rates that the search tries, each for all heads alike.
_ERROR_RATES = (0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32)

#: The choice is this many rates stricter than the best one.
_STEPS_BACK = 2

#: A confidence of 1 may have been rounded up to this, in bfloat16.
_MOST_CONFIDENT = 1.01

#: Folds of the cross-validation.
_FOLDS = 5


class Calibration(NamedTuple):
    """Thresholds for E heads, and accuracy and exits under them on the validation split of M samples."""

    thresholds: tuple[float, ...]
    """One for each head, a float32 value; 1.0 never exits."""
    accuracy: float
    """Accuracy of early exit, 0 to 1."""
    full_accuracy: float
    """Accuracy of the classifier alone, 0 to 1."""
    shares: tuple[float, ...]
    """The share of samples that leaves at each of the E + 1 exits, 0 to 1."""


def calibrate(confidence: Tensor, correct: Tensor, max_accuracy_drop: float = 0.005) -> Calibration:
    """Choose a ``max_prob`` threshold for each head.

    For an error rate r, each head takes the smallest threshold above which its samples are right at a rate of at least
    1 - r, counted as (right + 1) / (samples + 2), because a handful of samples that are right by luck proves little.
    All samples count, not only those that earlier heads leave for it: these are few. A head that cannot reach the rate
    gets 1.0.

    Of several r, the one is taken under which samples leave earliest (by the mean of their exit indices) while accuracy
    drops by at most ``max_accuracy_drop``: on the split itself, which always holds for the result, and in five-fold
    cross-validation. The best of several still fits accidents of a small split: if it loses samples in
    cross-validation, the result is two rates stricter (one, if no head would exit otherwise), in the spirit of the
    one-standard-error rule (Breiman et al., Classification and Regression Trees, 1984). If no r will do, no head exits.

    Args:
        confidence: [E, M] floating-point, of each head, 0 to 1; NaN never exits.
        correct: [E + 1, M] bool, true where a head or, last, the classifier is right; both on any device.
        max_accuracy_drop: 0.005 is half a percentage point.

    Raises:
        TypeError: an argument is no tensor, or of another dtype.
        ValueError: shapes that do not fit, no samples or heads, or confidences or a drop outside [0, 1].
    """
    _check(confidence, correct, max_accuracy_drop)
    confidence = confidence.detach().cpu().float().nan_to_num(nan=0.0).clamp(max=1.0)
    correct = correct.cpu()
    samples = confidence.shape[1]
    needed = int(correct[-1].sum()) - max_accuracy_drop * samples - 1e-6  # samples that must be answered right

    ranges = [CRITERIA["max_prob"].range] * confidence.shape[0]
    best = torch.ones(confidence.shape[0])
    earliest = nobody_leaves = float(confidence.shape[0])
    stricter: list[Tensor] = []  # candidates that hold and let some samples leave, the strictest first
    for rate in _ERROR_RATES:
        candidate = thresholds_at_error_rate(confidence, correct, rate, ranges)
        exits = exit_indices(confidence, candidate)
        if _right(correct, exits) < needed:
            continue
        mean_exit = exits.double().mean().item()
        if mean_exit == nobody_leaves:
            continue
        stricter.append(candidate)
        held_out = _lost_held_out(confidence, correct, rate, ranges)
        if mean_exit < earliest and held_out <= max_accuracy_drop * samples + 1e-6:
            earliest = mean_exit
            best = stricter[-1 - _STEPS_BACK :][0] if held_out else candidate

    exits = exit_indices(confidence, best)
    return Calibration(
        thresholds=tuple(best.tolist()),
        accuracy=_right(correct, exits) / samples,
        full_accuracy=int(correct[-1].sum()) / samples,
        shares=tuple((torch.bincount(exits, minlength=len(correct)) / samples).tolist()),
    )


def _check(confidence: Tensor, correct: Tensor, max_accuracy_drop: float) -> None:
    """Refuse arguments of :func:`calibrate` that do not fit."""
    for name, value in (("confidence", confidence), ("correct", correct)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {kind_of(value)}, wants a torch.Tensor")
    if not confidence.is_floating_point():
        raise TypeError(f"confidence: got {confidence.dtype}, wants a floating-point dtype")
    if correct.dtype != torch.bool:
        raise TypeError(f"correct: got {correct.dtype}, wants torch.bool (label == target)")
    if confidence.ndim != 2 or 0 in confidence.shape:
        shape = list(confidence.shape)
        raise ValueError(f"confidence: got shape {shape}, wants [E, M] of at least one head and one sample")
    heads, samples = confidence.shape
    if correct.shape != (heads + 1, samples):
        raise ValueError(
            f"correct: got shape {list(correct.shape)}, wants [{heads + 1}, {samples}]: a row for each head, as "
            "confidence has, and last one for the classifier"
        )
    low, high = (value.item() for value in confidence.detach().nan_to_num(nan=0.0).aminmax())
    if low < 0.0 or high > _MOST_CONFIDENT:
        raise ValueError(f"confidence: got values from {low:.4g} to {high:.4g}, wants probabilities in [0, 1]")
    if not isinstance(max_accuracy_drop, (int, float)):
        raise TypeError(f"max_accuracy_drop: got {max_accuracy_drop!r}, wants a number in [0, 1]")
    if not 0.0 <= max_accuracy_drop <= 1.0:
        raise ValueError(f"max_accuracy_drop: got {max_accuracy_drop}, wants a number in [0, 1]")


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
        error_rate: 0 to 1, counted as :func:`calibrate` says.
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


def _right(correct: Tensor, exits: Tensor) -> int:
    return int(correct.gather(0, exits[None]).sum())


def _lost_held_out(
    confidence: Tensor, correct: Tensor, error_rate: float, ranges: Sequence[tuple[float, float]]
) -> int:
    """Count, in cross-validation, the samples that the classifier gets right and early exit gets wrong.

    Samples that only a head gets right do not make up for them: on another split they may not be there.
    """
    fold = torch.arange(confidence.shape[1]) % _FOLDS
    lost = 0
    for held_out in range(_FOLDS):
        own = fold == held_out
        thresholds = thresholds_at_error_rate(confidence[:, ~own], correct[:, ~own], error_rate, ranges)
        exits = exit_indices(confidence[:, own], thresholds)
        lost += int((correct[-1, own] & ~correct[:, own].gather(0, exits[None])[0]).sum())
    return lost
