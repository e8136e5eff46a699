"""``ExitResult``: the answer of an early-exit network, sample by sample."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from ..kernels import HeadOutput


class ExitResult(NamedTuple):
    """The answer for N samples and K classes; the same from every runner."""

    label: Tensor
    """[N] int64."""
    confidence: Tensor
    """[N] float32."""
    probs: Tensor | None
    """[N, K] float32; None where a head leaves them out."""
    exit_index: Tensor
    """[N] int64: the index of the tap whose head answered; the number of taps for the classifier."""


# torch.export.save and AOTInductor refuse a NamedTuple without a name of its own
_pytree._register_namedtuple(ExitResult, serialized_type_name="auxhead.model.ExitResult")


def first_sure(answers: Sequence[HeadOutput], *, with_probs: bool) -> ExitResult:
    """Merge the answers of successive exits: each sample takes the first that is sure, else the last one."""
    sure = torch.stack([answer.exit for answer in answers])  # [exits, N]
    sure[-1] = True
    exit_index = sure.to(torch.uint8).argmax(dim=0)  # the first of equals

    def chosen(field: list[Tensor]) -> Tensor:
        stacked = torch.stack(field)  # [exits, N, ...]
        index = exit_index.view(1, -1, *[1] * (stacked.ndim - 2)).expand(1, *stacked.shape[1:])
        return stacked.gather(0, index)[0]

    probs = [answer.probs for answer in answers if answer.probs is not None]
    return ExitResult(
        label=chosen([answer.label for answer in answers]),
        confidence=chosen([answer.confidence for answer in answers]),
        probs=chosen(probs) if with_probs else None,
        exit_index=exit_index,
    )


def joined(results: Sequence[ExitResult]) -> ExitResult:
    """Join the answers of the parts of a batch."""
    probs = [result.probs for result in results if result.probs is not None]
    return ExitResult(
        label=torch.cat([result.label for result in results]),
        confidence=torch.cat([result.confidence for result in results]),
        probs=torch.cat(probs) if probs else None,
        exit_index=torch.cat([result.exit_index for result in results]),
    )
