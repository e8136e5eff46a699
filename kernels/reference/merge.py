"""The meaning of an answer: of each sample the first exit that is sure answers, else the last; patience counts heads.

    exit_index = the first i with exit[i], or the last exit, whose own ``exit`` does not count

Under patience (PABEE, Zhou et al., NeurIPS 2020) a sample exits where enough heads in a row gave it the same label:

    confidence[i] = how many heads in a row, ending with head i, gave the label of head i: 1, 2, 3, ...
    exit[i]       = confidence[i] > threshold

With threshold t that is the patience t of PABEE, in its code too: a label that has stayed the same t times in a row, so
that t + 1 heads agree; 0 exits at once. All heads before it count, in the order of the network, whatever their own rule
and even if they are disabled. A head that cannot tell, whose confidence is NaN, agrees with none, exits nobody, and the
count begins anew behind it. The kernel does the same in ``merge``, jit/merge.py; a pipeline's stages, which see a part
of the exits each, do so one exit after another in model/parallel/pipeline/answered.py.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from .criteria import CRITERIA
from .fused_head import HeadOutput, decide

#: Temperature, threshold and criterion of a head.
Rule = tuple[Tensor | float, Tensor | float, str]


class Merged(NamedTuple):
    """One answer for each of N samples."""

    label: Tensor
    """[N] int64."""
    confidence: Tensor
    """[N] float32, by the criterion of the exit that answers."""
    probs: Tensor | None
    """[N, K] float32, or None."""
    exit_index: Tensor
    """[N] int64: which exit answers, the first is 0."""


def merge(outputs: Sequence[HeadOutput], *, with_probs: bool) -> Merged:
    """Merge the outputs of successive exits of a network, as :func:`in_order` or :func:`decide_in_order` give them.

    The last one answers for all that no other is sure of. All outputs have ``probs``, if they are wanted; else a
    ``RuntimeError`` comes from PyTorch.
    """
    exit_index = first_exit(torch.stack([output.exit for output in outputs]))

    def chosen(field: list[Tensor]) -> Tensor:
        stacked = torch.stack(field)  # [exits, N, ...]
        index = exit_index.view(1, -1, *[1] * (stacked.ndim - 2)).expand(1, *stacked.shape[1:])
        return stacked.gather(0, index)[0]

    return Merged(
        chosen([output.label for output in outputs]),
        chosen([output.confidence for output in outputs]),
        chosen([output.probs for output in outputs if output.probs is not None]) if with_probs else None,
        exit_index,
    )


def first_exit(exits: Tensor) -> Tensor:
    """Return which exit answers for each sample, [N] int64, of who is sure, [exits, N]; the last row is not read."""
    answers = exits.to(torch.uint8, copy=True)
    answers[-1] = 1
    return answers.argmax(dim=0)  # the first of equals


def heads_in_a_row(count: Tensor, before: Tensor, output: HeadOutput) -> tuple[Tensor, Tensor]:
    """Count one more head: how many in a row, ending with it, gave its label; and that label, -1 if it cannot tell.

    ``count`` and ``before``, [N] each, are what it returned for the head before; 0 and -1 if there was none.
    """
    label = output.label.masked_fill(output.confidence.isnan(), -1)
    return torch.where(label == before, count + 1, 1), label


def in_order(outputs: Sequence[HeadOutput], threshold: Tensor | float, criterion: str) -> HeadOutput:
    """Return what the last of successive heads says by its rule, given what each says alone, in their order.

    That is the same unless its criterion counts heads, as "patience" does: its confidence, [N], is then how many in a
    row, ending with it, gave its label.
    """
    last = outputs[-1]
    if not CRITERIA[criterion].counts_heads:
        return last
    count, before = torch.zeros_like(last.confidence), torch.full_like(last.label, -1)
    for output in outputs:
        count, before = heads_in_a_row(count, before, output)
    confidence = torch.where(last.confidence.isnan(), last.confidence, count)
    return last._replace(confidence=confidence, exit=confidence > threshold)


def decide_in_order(logits: Iterable[Tensor], rules: Iterable[Rule]) -> list[HeadOutput]:
    """Return what successive exits say of their logits, [N, K] each, by the heads' rules.

    A rule is a temperature, a threshold and a criterion, as of :func:`fused_head`, and none is checked. Logits without
    a rule, behind those of all heads, are the classifier's.
    """
    outputs: list[HeadOutput] = []
    for of_exit, rule in zip_longest(logits, rules):
        temperature, threshold, criterion = rule or (1.0, 1.0, "max_prob")
        outputs.append(decide(of_exit, temperature, threshold, criterion))
        outputs[-1] = in_order(outputs, threshold, criterion)
    return outputs
