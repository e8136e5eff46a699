"""Patience: a sample exits where enough heads in a row gave it the same label (PABEE, Zhou et al., NeurIPS 2020).

    confidence[i] = how many heads in a row, ending with head i, gave the label of head i: 1, 2, 3, ...
    exit[i]       = confidence[i] > threshold

With threshold t that is the patience t of PABEE, in its code too: a label that has stayed the same t times in a row, so
that t + 1 heads agree; 0 exits at once. All heads before it count, in the order of the network, whatever their own rule
and even if they are disabled. A head that cannot tell, whose confidence is NaN, agrees with none, exits nobody, and the
count begins anew behind it. The kernel does the same in ``merge``, exit_kernel.py.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..head_output import HeadOutput
from .fused_head import decide

#: Temperature, threshold and criterion of a head.
Rule = tuple[Tensor | float, Tensor | float, str]


def with_patience(said: Sequence[HeadOutput], threshold: Tensor | float) -> HeadOutput:
    """Return what the last of successive heads says under patience, given what each says alone."""
    last = said[-1]
    count = torch.zeros_like(last.confidence)
    before = torch.full_like(last.label, -1)
    for output in said:
        label = output.label.masked_fill(output.confidence.isnan(), -1)
        count = torch.where(label == before, count + 1.0, 1.0)
        before = label
    confidence = torch.where(last.confidence.isnan(), last.confidence, count)
    return last._replace(confidence=confidence, exit=confidence > threshold)


def decide_in_order(logits: Iterable[Tensor], rules: Iterable[Rule]) -> list[HeadOutput]:
    """Return what successive heads say of their logits [N, K], patience included."""
    said: list[HeadOutput] = []
    for of_head, (temperature, threshold, criterion) in zip(logits, rules, strict=True):
        said.append(decide(of_head, temperature, threshold, criterion))
        if criterion == "patience":
            said[-1] = with_patience(said, threshold)
    return said
