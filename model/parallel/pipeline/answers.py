"""Answers of a pipeline: for each sample by the first exit that is sure, as they go along from stage to stage."""

from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels import CRITERIA, HeadOutput
from ....kernels.reference.merge import heads_in_a_row
from ...answers.exit_result import ExitResult
from ...answers.exit_rule import ExitRule
from ...network.early_exit_network import EarlyExitNetwork

#: Columns of what goes along with a sample, before those of the probabilities: the label of the last exit, -1 at first,
#: and how many exits in a row have said it, where an exit asks for that; then the answer: its exit, -1 while there is
#: none, its label and confidence. All are floats, of a type that holds each exactly.
COLUMNS = ("last_label", "in_a_row", "exit_index", "label", "confidence")


class AnswerForm(NamedTuple):
    """The form of a network's answers."""

    classes: int
    dtype: torch.dtype
    """Of confidences and probabilities."""
    with_probs: bool
    counts_heads: bool
    """Some exit may ask how many before it have said what it says."""

    @classmethod
    def of(cls, network: EarlyExitNetwork, device: torch.device) -> "AnswerForm":
        """Return that of a network whose heads have their sizes; where there are no graphs criteria may change."""
        heads = network.exit_heads
        dtype = torch.float64 if network.dtype == torch.float64 else torch.float32
        counts = device.type != "cuda" or any(CRITERIA[head.rule.criterion].counts_heads for head in heads)
        return cls(heads[0].num_classes, dtype, all(head.return_probs for head in heads), counts)

    def nothing_said(self, samples: int, device: torch.device) -> Tensor:
        """Return what goes along with samples that no exit has seen."""
        said = torch.zeros(samples, len(COLUMNS) + self.classes * self.with_probs, dtype=self.dtype, device=device)
        said[:, 0] = said[:, 2] = -1.0
        return said

    def result(self, said: Tensor) -> ExitResult:
        """Return what the last exit has left said, as what a network returns."""
        probs = said[:, len(COLUMNS) :].contiguous() if self.with_probs else None
        return ExitResult(said[:, 3].long(), said[:, 4].contiguous(), probs, said[:, 2].long())


def all_answered(said: Tensor) -> bool:
    """Return whether there is an answer for all samples; the host waits for it."""
    return said[:, 2].min().item() >= 0


class Decisions:
    """What exits say, one after another: each answers for those samples that it is the first to be sure of.

    All of it stays on the exits' device, without a wait of the host, in few launches: the last exit of a stage has no
    trunk beside it that would hide them.
    """

    def __init__(self, said: Tensor, form: AnswerForm) -> None:
        """Begin with samples that earlier stages have seen: see ``COLUMNS``."""
        self._last, self._answer, self._form = said[:, :2], said[:, 2:], form

    def add(self, of_exit: HeadOutput, rule: ExitRule | None, index: int) -> None:
        """Let the exit of an index answer, by its rule; None for the classifier, which answers for all that is left."""
        answer, confidence, now = self._answer, of_exit.confidence, self._answer[:, 0] < 0
        if self._form.counts_heads:
            label, in_a_row = self._last.long().unbind(1)
            in_a_row, label = heads_in_a_row(in_a_row, label, of_exit)
            self._last = torch.stack([label, in_a_row], 1).to(answer.dtype)
        if rule is not None and CRITERIA[rule.criterion].counts_heads:
            confidence = torch.where(confidence.isnan(), confidence, in_a_row.to(confidence.dtype))
            now &= confidence > rule.threshold_tensor
        elif rule is not None:
            now &= of_exit.exit.bool()
        columns = [torch.full_like(answer[:, :1], index), of_exit.label[:, None], confidence[:, None]]
        if self._form.with_probs and of_exit.probs is not None:
            columns.append(of_exit.probs)
        says = torch.cat([each.to(answer.dtype) for each in columns], 1)
        self._answer = torch.where(now[:, None], says, answer)

    def result(self) -> Tensor:
        """Return what goes along to the next stage."""
        return torch.cat([self._last, self._answer], 1)
