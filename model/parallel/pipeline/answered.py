"""Answers of a stage: decided on its device, for each sample by the first exit that is sure, and packed to be sent."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels import HeadOutput
from ...exit_result import ExitResult
from ...exit_rule import ExitRule

#: Columns of an answer, before those of the probabilities. Its numbers are floats, which hold each of these exactly.
COLUMNS = ("place", "label", "confidence", "exit_index")
#: Answers, [M, 4 or 4 + K], as the host has them.
Answers = NDArray[np.floating]
#: What a stage says of samples has the columns of answers, the places left to be filled in by the host. In place of the
#: exit's index it has this for samples that stay open, and for those that an earlier stage has answered.
NO_ANSWER = -1
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


class Sayings:
    """What exits say of N samples, one exit after another: each answers for those that it is the first to be sure of.

    All of it stays on the exits' device, without a wait of the host.
    """

    def __init__(self, state: Tensor, dtype: torch.dtype, *, with_probs: bool) -> None:
        """Begin with samples that earlier stages have seen.

        Args:
            state: [N, 3] int64, see ``STATE``.
            dtype: of what is said, as wide as confidences are.
            with_probs: say the probabilities, too.
        """
        self._before, self._agreed, self._answered = state.unbind(1)
        self._found: list[Tensor] = []
        self._probs: Tensor | None = None
        self._dtype, self._with_probs = dtype, with_probs

    def add(self, of_exit: HeadOutput, rule: ExitRule | None, index: int) -> None:
        """Let the exit of an index answer, by its rule; None for the classifier, which answers for all that is left."""
        if not self._found:  # on the stream of the first exit, which all that is allocated here is for
            self._open = self._answered == 0
            no_exit = torch.full_like(self._before, NO_ANSWER)
            self._found = [torch.zeros_like(of_exit.label), torch.zeros_like(of_exit.confidence), no_exit]
            if self._with_probs and of_exit.probs is not None:
                self._probs = torch.zeros_like(of_exit.probs)
        confidence, sure = of_exit.confidence, of_exit.exit.bool()
        told = of_exit.label.masked_fill(confidence.isnan(), -1)  # as kernels/patience.py counts
        self._agreed = torch.where(told == self._before, self._agreed + 1, 1)
        self._before = told
        if rule is None:
            sure = torch.ones_like(sure)
        elif rule.criterion == "patience":
            confidence = torch.where(confidence.isnan(), confidence, self._agreed.to(confidence.dtype))
            sure = confidence > rule.threshold_tensor
        now = self._open & sure
        says = of_exit.label, confidence, torch.full_like(self._before, index)
        self._found = [torch.where(now, new, old) for new, old in zip(says, self._found, strict=True)]
        if self._probs is not None and of_exit.probs is not None:
            self._probs = torch.where(now[:, None], of_exit.probs, self._probs)
        self._open = self._open & ~sure

    def result(self) -> tuple[Tensor, Tensor]:
        """Return what all say, [N, 4 or 4 + K], see ``COLUMNS`` and ``NO_ANSWER``, and the state for the next stage."""
        parts = [torch.zeros_like(self._before), *self._found]
        columns = [part.to(self._dtype)[:, None] for part in parts]
        if self._probs is not None:
            columns.append(self._probs.to(self._dtype))
        answered = (~self._open).to(self._before.dtype)
        return torch.cat(columns, 1), torch.stack([self._before, self._agreed, answered], 1)


def first_state(samples: int) -> Tensor:
    """Return the state of samples that no exit has seen, [N, 3] int64; see ``STATE``."""
    return torch.tensor([-1, 0, 0]).repeat(samples, 1)


def settle(first: int, samples: int, said: Tensor) -> Answers:
    """Return the answers in what a stage says of a micro-batch, on the CPU.

    Args:
        first: place of its first sample in the request.
        samples: how many it has; the rows behind them are nobody's.
        said: see :class:`Sayings`.
    """
    columns = said.numpy()[:samples]
    now = np.flatnonzero(columns[:, 3] != NO_ANSWER)
    answers = columns[now]
    answers[:, 0] = first + now
    return answers


def as_result(answers: Tensor, *, with_probs: bool) -> ExitResult:
    """Return answers, which are in order, as what a network returns."""
    return ExitResult(
        label=answers[:, 1].long(),
        confidence=answers[:, 2].clone(),
        probs=answers[:, len(COLUMNS) :].contiguous() if with_probs else None,
        exit_index=answers[:, 3].long(),
    )
