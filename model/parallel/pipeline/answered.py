"""Answers of a stage: decided on its device, for each sample by the first exit that is sure, and packed to be sent."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels import HeadOutput
from ...exit_result import ExitResult
from ...exit_rule import ExitRule
from .survivors import NOBODY, Places

#: Columns of an answer, before those of the probabilities. Its numbers are floats, which hold each of these exactly.
COLUMNS = ("place", "label", "confidence", "exit_index")
#: Answers, [M, 4 or 4 + K], as the host has them.
Answers = NDArray[np.floating]
#: What a stage says of samples has the columns of answers, the places left to be filled in by the host; in place of
#: the exit's index, it says of samples that stay open, and of those that an earlier stage has answered:
OPEN, ANSWERED = -1, -2
#: What a sample takes along from stage to stage, on the device: the label of the last exit, -1 at first; how many
#: exits in a row have said that label; and 1 once it is answered.
STATE = ("label", "agreed", "answered")


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
) -> tuple[Tensor, Tensor]:
    """Let exits answer for N samples, each for those that it is the first one to be sure of.

    Args:
        exits: what each says of all samples.
        rules: of the exits; None for the classifier, which answers for all that is left.
        first_exit: the index of the first of them.
        state: [N, 3] int64, see ``STATE``.
        dtype: of the result, as wide as confidences are.
        with_probs: append the probabilities.

    Returns:
        What they say, [N, 4 or 4 + K], see ``COLUMNS`` and ``OPEN``, and the state for the next stage; on the exits'
        device, without a wait of the host.
    """
    before, agreed, answered = state.unbind(1)
    open_ = answered == 0
    found = [torch.zeros_like(exits[0].label), torch.zeros_like(exits[0].confidence), torch.full_like(before, OPEN)]
    found[2] = found[2].masked_fill(~open_, ANSWERED)
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
    columns = [part.to(dtype)[:, None] for part in (torch.zeros_like(before), *found)]
    said = torch.cat(columns if probs is None else [*columns, probs.to(dtype)], 1)
    return said, torch.stack([before, agreed, (~open_).to(before.dtype)], 1)


def first_state(samples: int) -> Tensor:
    """Return the state of samples that no exit has seen, [N, 3] int64; see ``STATE``."""
    return torch.tensor([-1, 0, 0]).repeat(samples, 1)


def settle(places: Places, said: Tensor) -> tuple[Answers, Places]:
    """Take what a stage says of a micro-batch apart, on the CPU.

    Args:
        places: of its samples.
        said: see :func:`said_by`.

    Returns:
        The answers for its samples, and the places of those that stay open.
    """
    columns = said.numpy()
    used, exits = places != NOBODY, columns[:, 3]
    now = used & (exits >= 0)
    answers = columns[now]
    answers[:, 0] = places[now]
    return answers, np.where(used & (exits == OPEN), places, NOBODY)


def as_result(answers: Tensor, *, with_probs: bool) -> ExitResult:
    """Return answers, which are in order, as what a network returns."""
    return ExitResult(
        label=answers[:, 1].long(),
        confidence=answers[:, 2].clone(),
        probs=answers[:, len(COLUMNS) :].contiguous() if with_probs else None,
        exit_index=answers[:, 3].long(),
    )
