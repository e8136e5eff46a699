"""``ExitLog``: what the heads said of samples that have come, in order, beside the classifier's answers."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.criteria import CRITERIA, check_criterion
from ..arguments import kind_of


class ExitLog(NamedTuple):
    """What E heads said of M samples in the order in which they came, whether or not the samples left there."""

    scores: Tensor
    """[E, M] float; larger is surer."""
    agrees: Tensor
    """[E, M] bool, true where the head's label is that of the classifier; the truth is not known in use."""
    criteria: tuple[str, ...]
    """Of each head, for the range of its scores."""

    def disagreement(self, exits: Tensor) -> float:
        """Return the share of samples that get another answer than the classifier's, given their exit indices."""
        kept = torch.cat([self.agrees, torch.ones_like(self.agrees[:1])])
        return (~kept.gather(0, exits[None])[0]).double().mean().item()

    def between(self, begin: int, end: int) -> "ExitLog":
        """Return the samples from ``begin`` to ``end``, which is not included."""
        return ExitLog(self.scores[:, begin:end], self.agrees[:, begin:end], self.criteria)


def checked(log: object) -> ExitLog:
    """Return a log on the CPU, its scores as the float32 that heads compare, NaN as the least.

    Raises:
        TypeError, ValueError: it is none, or its parts do not fit each other.
    """
    if not isinstance(log, ExitLog):
        raise TypeError(f"log: got {kind_of(log)}, wants an ExitLog")
    scores, agrees, criteria = log
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.ndim != 2 or 0 in scores.shape:
        got = f"shape {list(scores.shape)} of {scores.dtype}" if isinstance(scores, Tensor) else kind_of(scores)
        raise ValueError(f"log.scores: got {got}, wants [E, M] floats of at least one head and one sample")
    if not isinstance(agrees, Tensor) or agrees.dtype != torch.bool or agrees.shape != scores.shape:
        got = f"shape {list(agrees.shape)} of {agrees.dtype}" if isinstance(agrees, Tensor) else kind_of(agrees)
        raise ValueError(f"log.agrees: got {got}, wants {list(scores.shape)} of torch.bool, as log.scores has")
    if len(criteria) != len(scores):
        raise ValueError(f"log.criteria: got {len(criteria)}, wants {len(scores)}, one for each head")
    for criterion in criteria:
        check_criterion(criterion)
    lowest = torch.tensor([CRITERIA[criterion][0] for criterion in criteria])[:, None]
    scores = scores.detach().cpu().float()
    return ExitLog(torch.where(scores.isnan(), lowest, scores), agrees.cpu(), criteria)
