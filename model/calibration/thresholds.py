"""Thresholds from a validation split: leave as early as possible for at most a given loss of accuracy."""

from typing import NamedTuple

import torch
from torch import Tensor

#: Error rates that the exits may have in common; the search tries each.
_ERROR_RATES = (0, 0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.16, 0.24, 0.32)

#: How many rates stricter than the best one the choice is.
_STEPS_BACK = 2

#: Parts of the validation split for checking thresholds on pictures that did not choose them.
_FOLDS = 5


class Calibration(NamedTuple):
    """Thresholds for E heads and what they do on the validation split of M pictures."""

    thresholds: tuple[float, ...]
    """One a head, each a float32 value; 1.0 never exits."""
    accuracy: float
    """Of early exit, 0 to 1."""
    full_accuracy: float
    """Of the classifier alone, 0 to 1."""
    shares: tuple[float, ...]
    """Of the pictures that leave at each of the E + 1 exits, 0 to 1."""


def calibrate(confidence: Tensor, correct: Tensor, max_accuracy_drop: float = 0.005) -> Calibration:
    """Choose a ``max_prob`` threshold for each head.

    For a common error rate r, each head takes the smallest threshold at which the pictures that are surer than that are
    right at a rate of at least 1 - r, counted as (right + 1) / (pictures + 2), because a handful of pictures that are
    right by luck proves little. All pictures count, not only those that earlier heads leave for it: these are few.
    A head that cannot reach the rate gets 1.0.

    Of many r, find the one under which pictures leave earliest (by the mean place of their exits) while accuracy drops
    by at most ``max_accuracy_drop``: on the split itself, which always holds for what is returned, and by
    cross-validation, each fifth of the pictures judged by thresholds from the others. The best of many fits the
    accidents of a small split all the same: where it loses pictures in cross-validation, what is returned is two steps
    stricter, or one where no head would exit otherwise, in the spirit of the one-standard-error rule (Breiman et al.,
    Classification and Regression Trees, 1984).
    If no r will do, no head exits.

    Args:
        confidence: [E, M] float32, of each head; NaN never exits.
        correct: [E + 1, M] bool, whether each head and, last, the classifier is right; both on any device.
        max_accuracy_drop: 0.005 is half a percentage point.

    Raises:
        TypeError: what is no tensor.
        ValueError: shapes that do not fit, no pictures, or a drop outside [0, 1].
    """
    for name, value in (("confidence", confidence), ("correct", correct)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, wants a tensor")
    if confidence.ndim != 2 or correct.shape != (confidence.shape[0] + 1, confidence.shape[1]):
        raise ValueError(
            f"correct: got {list(correct.shape)} with confidence {list(confidence.shape)}, wants [E + 1, M] and [E, M]"
        )
    if confidence.shape[1] == 0:
        raise ValueError("confidence: got no pictures, wants at least one to calibrate on")
    if not 0.0 <= max_accuracy_drop <= 1.0:
        raise ValueError(f"max_accuracy_drop: got {max_accuracy_drop}, wants a number in [0, 1]")
    confidence = confidence.detach().cpu().float().nan_to_num(nan=0.0)
    correct = correct.detach().cpu().bool()
    pictures = confidence.shape[1]
    needed = int(correct[-1].sum()) - max_accuracy_drop * pictures - 1e-6  # pictures that must be answered right

    best = torch.ones(confidence.shape[0])
    earliest = nobody_leaves = float(confidence.shape[0])
    stricter: list[Tensor] = []  # what holds and lets some leave, the strictest first
    for rate in _ERROR_RATES:
        candidate = _thresholds_for(confidence, correct, rate)
        exits = exit_places(confidence, candidate)
        if _right(correct, exits) < needed:
            continue
        place = exits.double().mean().item()
        if place == nobody_leaves:
            continue
        stricter.append(candidate)
        held_out = _lost_held_out(confidence, correct, rate)
        if place < earliest and held_out <= max_accuracy_drop * pictures + 1e-6:
            earliest = place
            best = stricter[-1 - _STEPS_BACK :][0] if held_out else candidate

    exits = exit_places(confidence, best)
    return Calibration(
        thresholds=tuple(best.tolist()),
        accuracy=_right(correct, exits) / pictures,
        full_accuracy=int(correct[-1].sum()) / pictures,
        shares=tuple((torch.bincount(exits, minlength=len(correct)) / pictures).tolist()),
    )


def exit_places(confidence: Tensor, thresholds: Tensor) -> Tensor:
    """Return where each picture leaves, [M] int64: the first head with confidence > threshold, else E."""
    sure = torch.cat([confidence > thresholds[:, None], torch.ones(1, confidence.shape[1], dtype=torch.bool)])
    return sure.to(torch.uint8).argmax(dim=0)  # the first of equals


def _thresholds_for(confidence: Tensor, correct: Tensor, error_rate: float) -> Tensor:
    """The smallest thresholds [E] above which each head is right often enough."""
    thresholds = torch.ones(confidence.shape[0])
    pictures = torch.arange(1, confidence.shape[1] + 1, dtype=torch.float64)  # [M], surer than each cut
    for head, unsorted in enumerate(confidence):
        sure, order = unsorted.sort(descending=True, stable=True)
        right = correct[head, order].double().cumsum(0)
        enough = (right + 1) / (pictures + 2) >= 1.0 - error_rate
        below = torch.cat([sure[1:], sure.new_zeros(1)])  # the first confidence that stays
        cuts = (enough & (sure > below)).nonzero()  # equals leave together
        if len(cuts):
            cut = int(cuts[-1])
            thresholds[head] = _between(below[cut], sure[cut], last=cut + 1 == len(sure))
    return thresholds


def _between(stays: Tensor, leaves: Tensor, last: bool) -> Tensor:
    """A threshold that lets ``leaves`` exit and not ``stays``: half-way, or just below where nothing stays."""
    if last:
        return torch.nextafter(leaves, torch.zeros(()))
    middle = ((stays.double() + leaves.double()) / 2).float()
    return middle if middle < leaves else stays


def _right(correct: Tensor, exits: Tensor) -> int:
    return int(correct.gather(0, exits[None]).sum())


def _lost_held_out(confidence: Tensor, correct: Tensor, error_rate: float) -> int:
    """How many pictures only the classifier gets right, under thresholds that the picture had no part in.

    Those that only a head gets right do not make up for them: on another split they may not be there.
    """
    fold = torch.arange(confidence.shape[1]) % _FOLDS
    lost = 0
    for held_out in range(_FOLDS):
        own = fold == held_out
        thresholds = _thresholds_for(confidence[:, ~own], correct[:, ~own], error_rate)
        exits = exit_places(confidence[:, own], thresholds)
        lost += int((correct[-1, own] & ~correct[:, own].gather(0, exits[None])[0]).sum())
    return lost
