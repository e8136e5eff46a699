"""Whether two runs of one network answer alike, but for samples on which rounding decides."""

from collections.abc import Sequence
from typing import NamedTuple

from .exit_result import ExitResult

#: How far rounding may move a confidence: half precision resolves 0.0005 just below 1, and the logits add theirs.
ROUNDING = 0.01


class Agreement(NamedTuple):
    """Of the samples of a batch, how many have the same label and exit in both results."""

    alike: int
    close: int
    """Unlike, but within ``ROUNDING`` of the threshold or of the second best label that would have made them alike."""
    unlike: int
    """Unlike for no such reason."""


def agreement(found: ExitResult, wanted: ExitResult, thresholds: Sequence[float]) -> Agreement:
    """Compare two results for one batch, with the thresholds in force at the heads, in their order."""
    counts = [0, 0, 0]
    rows = zip(*(field.tolist() for one in (found, wanted) for field in (one.label, one.exit_index)), strict=True)
    for row, (label, exit_index, other_label, other_exit) in enumerate(rows):
        if (label, exit_index) == (other_label, other_exit):
            counts[0] += 1
            continue
        if exit_index != other_exit:  # the earlier exit was sure in one of them, and only just, if rounding decided
            left_first = found if exit_index < other_exit else wanted
            gap = float(left_first.confidence[row]) - thresholds[min(exit_index, other_exit)]
        elif wanted.probs is not None:
            gap = float(wanted.probs[row, other_label] - wanted.probs[row, label])
        else:
            gap = float(wanted.confidence[row] - found.confidence[row])
        counts[1 if abs(gap) <= ROUNDING else 2] += 1
    return Agreement(*counts)
