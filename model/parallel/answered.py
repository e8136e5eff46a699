"""Answers of a stage, on the host: who is sure of which sample, packed as the first rank collects them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import CRITERIA, HeadOutput
from ..exit_result import ExitResult
from ..exit_rule import ExitRule
from .survivors import empty_rows

#: Columns of a packed answer, before those of the probabilities.
COLUMNS = ("place", "label", "confidence", "exit_index")


def packed(said: Sequence[HeadOutput], *, with_probs: bool) -> Tensor:
    """Return what exits say of N samples as one float64 tensor [exits, N, 3 or 3 + K], which holds each part exactly.

    The parts are label, confidence, exit and probabilities.
    """
    columns = []
    for output in said:
        parts = [part.double()[:, None] for part in (output.label, output.confidence, output.exit)]
        columns.append(
            torch.cat([*parts, output.probs.double()] if with_probs and output.probs is not None else parts, 1)
        )
    return torch.stack(columns)


def settle(rows: Tensor, said: Tensor, rules: Sequence[ExitRule | None], first_exit: int) -> tuple[Tensor, Tensor]:
    """Let the exits of a stage answer for the open samples of a micro-batch, each for those that it is first sure of.

    Args:
        rows: see ``ROW``.
        said: of :func:`packed`, on the CPU.
        rules: of the exits; None for the classifier, which answers for all that is left.
        first_exit: the index of the first of them.

    Returns:
        The answers, [M, 4 or 4 + K] float64 (see ``COLUMNS``), and the rows of the samples that stay open.
    """
    place, before, agreed = rows.unbind(1)
    open_, answers = place >= 0, []
    for index, (of_exit, rule) in enumerate(zip(said, rules, strict=True)):
        label, confidence, sure = of_exit[:, 0].long(), of_exit[:, 1], of_exit[:, 2] > 0
        told = label.masked_fill(confidence.isnan(), -1)  # as kernels/patience.py counts
        agreed = torch.where(told == before, agreed + 1, 1)
        before = told
        if rule is None:
            sure = torch.ones_like(sure)
        elif rule.criterion == "patience":
            confidence = torch.where(confidence.isnan(), confidence, agreed.double())
            sure = confidence > _threshold(rule)
        now = open_ & sure
        exits = torch.full_like(place, first_exit + index)
        answers.append(torch.cat([torch.stack([place, label, confidence, exits], 1), of_exit[:, 3:]], 1)[now])
        open_ = open_ & ~sure
    left = torch.where(open_[:, None], torch.stack([place, before, agreed], 1), empty_rows(1))
    return torch.cat(answers), left


def _threshold(rule: ExitRule) -> float:
    return rule.threshold if rule.enabled else CRITERIA[rule.criterion].high


def in_order(answers: Tensor, dtype: torch.dtype, *, with_probs: bool) -> ExitResult:
    """Return the answers of all samples of a request, in the order of their places."""
    answers = answers[answers[:, 0].argsort()]
    return ExitResult(
        label=answers[:, 1].long(),
        confidence=answers[:, 2].to(dtype),
        probs=answers[:, len(COLUMNS) :].to(dtype) if with_probs else None,
        exit_index=answers[:, 3].long(),
    )
