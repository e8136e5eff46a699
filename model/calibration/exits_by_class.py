"""Rows of the report by class: how many samples, how often right, and where they leave."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .report import CalibratedClass


def exits_by_class(labels: Tensor, exits: Tensor, correct: Tensor, classes: int) -> list[CalibratedClass]:
    """Return a row for each class, in the order of the labels, those without samples included.

    Args:
        labels: [M] int64.
        exits: [M] int64, where each sample leaves.
        correct: [E + 1, M] bool, true where an exit is right.
        classes: number of classes.
    """
    right = correct.gather(0, exits[None])[0]
    rows = []
    for label in range(classes):
        own = labels == label
        samples = int(own.sum())
        left = exits[own]
        rows.append(
            CalibratedClass(
                name=str(label),
                samples=samples,
                accuracy=right[own].double().mean().item() if samples else None,
                full_accuracy=correct[-1, own].double().mean().item() if samples else None,
                shares=(torch.bincount(left, minlength=len(correct)).double() / samples).tolist() if samples else None,
                mean_exit=left.double().mean().item() if samples else None,
            )
        )
    return rows


def most_telling(rows: Sequence[CalibratedClass], each: int) -> list[CalibratedClass]:
    """Return the classes that are right least often and those that leave latest, so many of either, as they stand."""
    seen = [(index, row.accuracy, row.mean_exit) for index, row in enumerate(rows)]
    wrong = sorted((accuracy, index) for index, accuracy, _ in seen if accuracy is not None)
    late = sorted((-mean_exit, index) for index, _, mean_exit in seen if mean_exit is not None)
    return [rows[index] for index in sorted({index for _, index in (*wrong[:each], *late[:each])})]
