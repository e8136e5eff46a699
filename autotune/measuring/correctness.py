"""Compares a variant's answers with the truth, sample by sample; what rounding explains is counted apart."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...model import ExitResult


class Answer(NamedTuple):
    """A variant's answer for a batch of N."""

    label: Tensor
    """[N] int64."""
    confidence: Tensor
    """[N] floating point."""
    exit_index: Tensor
    """[N] int64; the number of taps for the classifier."""

    @classmethod
    def of(cls, result: "ExitResult | Answer") -> "Answer":
        """Return the answer in a runner's result, confidences in float64."""
        return cls(result.label, result.confidence.double(), result.exit_index)


class Truth(NamedTuple):
    """The eager network's answer for a batch of N, and by how much rounding may change it."""

    answer: Answer
    near_threshold: Tensor
    """[N] bool: within rounding of a threshold on the way, so that it may leave at another exit."""
    possible: Tensor
    """[N, K] bool: the classes within rounding of the label's logit at the exit, the label among them."""
    slack: Tensor
    """[N]: by how much the confidence may be off."""

    @property
    def near(self) -> Tensor:
        """[N] bool: whether rounding may change the answer."""
        return self.near_threshold | (self.possible.sum(1) > 1)


class Comparison:
    """Counts differences over batches; nothing waits for the device until ``counts`` is called."""

    def __init__(self) -> None:
        self._samples = 0
        self._counted: list[Tensor] = []

    def add(self, found: Answer, truth: Truth) -> None:
        """Compare one batch.

        Raises:
            ValueError: the answers are for another number of samples.
        """
        wanted = truth.answer
        if found.label.shape != wanted.label.shape:
            raise ValueError(f"answers for {tuple(found.label.shape)} samples, wants {tuple(wanted.label.shape)}")
        elsewhere = found.exit_index != wanted.exit_index
        differs = elsewhere | (found.label != wanted.label)
        classes = truth.possible.shape[1]
        tied = truth.possible.gather(1, found.label.clamp(0, classes - 1)[:, None])[:, 0]
        excused = differs & torch.where(elsewhere, truth.near_threshold, tied)
        off = ~((found.confidence.double() - wanted.confidence).abs() <= truth.slack)  # a NaN is off, too
        self._samples += len(differs)
        counts = (differs, excused, truth.near, off & ~elsewhere)
        self._counted.append(torch.stack([mask.sum() for mask in counts]))

    def counts(self) -> dict[str, int]:
        """Return the counts that a :class:`Record` holds; confidences are compared where the exit is right."""
        total = torch.stack(self._counted).sum(0).tolist() if self._counted else [0, 0, 0, 0]
        names = ("differing", "differing_near", "near", "confidence_off")
        return {"samples": self._samples, **dict(zip(names, total, strict=True))}


def verdict(counts: dict[str, int]) -> str | None:
    """Return what is wrong with the answers, or None."""
    wrong = counts["differing"] - counts["differing_near"]
    if wrong:
        return f"answers differ from the eager network's: {wrong} of {counts['samples']} samples, beyond rounding"
    if counts["confidence_off"]:
        return f"confidences differ from the eager network's: {counts['confidence_off']} of {counts['samples']} samples"
    return None if counts["samples"] else "nothing was compared"
