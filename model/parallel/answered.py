"""Answers of a stage: decided on its device, for each sample by the first exit that is sure, and packed to be sent."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import HeadOutput
from ..exit_result import ExitResult
from ..exit_rule import ExitRule
from .survivors import Rows, empty_rows

#: Columns of an answer, before those of the probabilities. Its numbers are floats, which hold each of these exactly.
COLUMNS = ("place", "label", "confidence", "exit_index")
#: Columns of what a stage says of a sample. Of one that stays open the exit index is -1, and label and agreed are as
#: ``ROW`` has them.
SAID = ("agreed", *COLUMNS[1:])


class AnswerForm(NamedTuple):
    """The form of a network's answers."""

    classes: int
    dtype: torch.dtype
    """Of confidences and probabilities."""
    with_probs: bool

    @property
    def width(self) -> int:
        """How many numbers an answer has."""
        return len(COLUMNS) + self.classes * self.with_probs


def said_by(
    exits: Sequence[HeadOutput],
    rules: Sequence[ExitRule | None],
    first_exit: int,
    state: Tensor,
    dtype: torch.dtype,
    *,
    with_probs: bool,
) -> Tensor:
    """Let exits answer for N samples, each for those that it is the first one to be sure of.

    Args:
        exits: what each says of all samples.
        rules: of the exits; None for the classifier, which answers for all that is left.
        first_exit: the index of the first of them.
        state: [N, 2] int64, of each sample the label of the exit before, -1 if there is none, and how many exits in a
            row have said it.
        dtype: of the result, as wide as confidences are.
        with_probs: append the probabilities.

    Returns:
        [N, 4 or 4 + K], see ``SAID``, on the exits' device, without a wait of the host.
    """
    before, agreed = state.unbind(1)
    open_ = torch.ones_like(before, dtype=torch.bool)
    found = [torch.zeros_like(exits[0].label), torch.zeros_like(exits[0].confidence), torch.full_like(before, -1)]
    probs = torch.zeros_like(exits[0].probs) if with_probs and exits[0].probs is not None else None
    for index, (of_exit, rule) in enumerate(zip(exits, rules, strict=True), first_exit):
        confidence, sure = of_exit.confidence, of_exit.exit.bool()
        told = of_exit.label.masked_fill(confidence.isnan(), -1)  # as kernels/patience.py counts
        agreed = torch.where(told == before, agreed + 1, 1)
        before = told
        if rule is None:
            sure = torch.ones_like(sure)
        elif rule.criterion == "patience":
            confidence = torch.where(confidence.isnan(), confidence, agreed.to(confidence.dtype))
            sure = confidence > rule.threshold_tensor
        now = open_ & sure
        says = of_exit.label, confidence, torch.full_like(before, index)
        found = [torch.where(now, new, old) for new, old in zip(says, found, strict=True)]
        if probs is not None and of_exit.probs is not None:
            probs = torch.where(now[:, None], of_exit.probs, probs)
        open_ = open_ & ~sure
    label, *others = found
    columns = [part.to(dtype)[:, None] for part in (agreed, torch.where(open_, before, label), *others)]
    return torch.cat(columns if probs is None else [*columns, probs.to(dtype)], 1)


def settle(rows: Rows, said: Tensor) -> tuple[Tensor, Rows]:
    """Take what a stage says of a micro-batch apart, on the CPU.

    Args:
        rows: see ``ROW``, as the micro-batch came.
        said: see ``SAID``.

    Returns:
        The answers for its samples, [M, 4 or 4 + K] (see ``COLUMNS``), and the rows of those that stay open.
    """
    columns = said.numpy()
    used, open_ = rows[:, 0] >= 0, columns[:, 3] < 0
    now = used & ~open_
    answers = columns[now]
    answers[:, 0] = rows[now, 0]
    left = empty_rows(len(rows))
    stays = used & open_
    left[stays, 0], left[stays, 1:] = rows[stays, 0], columns[stays, 1::-1]
    return torch.from_numpy(answers), left


def as_result(answers: Tensor, *, with_probs: bool) -> ExitResult:
    """Return answers, which are in order, as what a network returns."""
    return ExitResult(
        label=answers[:, 1].long(),
        confidence=answers[:, 2].clone(),
        probs=answers[:, len(COLUMNS) :].contiguous() if with_probs else None,
        exit_index=answers[:, 3].long(),
    )
