"""Whether a variant answers as the eager network does, sample by sample; what differs by rounding alone is counted."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...model import EarlyExitNetwork, FusedAuxHead
from ...model.taps import listening

#: Two right answers may differ by this many times the rounding error that the eager network was measured to have: each
#: of them may be off by twice that (DESIGN.md's bound), on either side.
ROUNDINGS = 4.0


class Answer(NamedTuple):
    """What a variant says about a batch of N."""

    label: Tensor
    """[N] int64."""
    confidence: Tensor
    """[N] floating point."""
    exit_index: Tensor
    """[N] int64; the number of taps for the classifier."""


class Truth(NamedTuple):
    """What the eager network says about a batch of N, and how sure that is."""

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


class Rounding(NamedTuple):
    """How far the eager network is from itself in float64: the largest error of each exit over the inputs."""

    logit: list[float]
    confidence: list[float]


def logits_of_exits(
    module: nn.Module, taps: Sequence[str], heads: Sequence[Callable[[Tensor], Tensor]], x: Tensor,
    classifier: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run eagerly and return the logits [N, K] of every exit, the classifier's last."""
    logits: list[Tensor] = []
    with torch.no_grad(), listening(module, taps, lambda place, y: logits.append(heads[place](y))):
        final = module(x)
    return [*logits, final if classifier is None else classifier(final)]


def measure_rounding(network: EarlyExitNetwork, inputs: Sequence[Tensor]) -> Rounding:
    """Compare the eager network with a copy of it in float64."""
    exact = copy.deepcopy(network).double()
    logit = [0.0] * len(exact.heads) + [0.0]
    confidence = list(logit)
    rules = [head.rule for head in _fused(network)]
    temperatures = [*(rule.temperature for rule in rules), 1.0]
    for x in inputs:
        found = logits_of_exits(network.backbone, network.taps, [head.logits for head in _fused(network)], x)
        wide = x.double() if x.is_floating_point() else x
        wanted = logits_of_exits(exact.backbone, exact.taps, [head.logits for head in _fused(exact)], wide)
        for place, (had, want) in enumerate(zip(found, wanted, strict=True)):
            step = 2.0 * _eps(had)
            off = (had.double() - want).abs().max() + step * want.abs().max()
            logit[place] = max(logit[place], off.item())
            had, want = (_softmax(y, temperatures[place]).amax(1) for y in (had, want))
            confidence[place] = max(confidence[place], (had - want).abs().max().item() + step)
    return Rounding(logit, confidence)


def eager_truth(logits: Sequence[Tensor], heads: Sequence[FusedAuxHead], rounding: Rounding) -> Truth:
    """Let the first sure exit answer for each sample, by the heads' rules as they are now.

    Args:
        logits: [N, K] of every exit, as the trunk in question gives them eagerly.
        heads: whose rules apply, for all exits but the last.
        rounding: of the network.
    """
    samples, device = len(logits[0]), logits[0].device
    open_, near_threshold = (torch.full((samples,), value, device=device) for value in (True, False))
    possible = torch.zeros_like(logits[0], dtype=torch.bool)
    label, exit_index = (torch.zeros(samples, dtype=torch.int64, device=device) for _ in range(2))
    confidence, slack = (torch.zeros(samples, dtype=torch.float64, device=device) for _ in range(2))
    for place, at_exit in enumerate(logits):
        rule = heads[place].rule if place < len(heads) else None
        sure = _softmax(at_exit, rule.temperature if rule else 1.0).amax(1)
        leaves = open_.clone()
        if rule is not None:
            threshold = float(rule.threshold_tensor.item())
            leaves &= sure > threshold
            if 0.0 < threshold < 1.0:  # beyond the ends of the range nothing can be rounded
                near_threshold |= open_ & ((sure - threshold).abs() <= ROUNDINGS * rounding.confidence[place])
        below_first = at_exit.double().amax(1, keepdim=True) - at_exit.double()  # [N, K]
        possible |= leaves[:, None] & (below_first <= ROUNDINGS * rounding.logit[place])
        label = torch.where(leaves, at_exit.argmax(1), label)
        exit_index = torch.where(leaves, place, exit_index)
        confidence = torch.where(leaves, sure, confidence)
        slack = torch.where(leaves, ROUNDINGS * rounding.confidence[place], slack)
        open_ &= ~leaves
    return Truth(Answer(label, confidence, exit_index), near_threshold, possible, slack)


class Comparison:
    """Counts over batches; nothing waits for the device until ``counts`` is asked."""

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
        """Return the counts that a :class:`Record` holds; confidences only of right exits."""
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


def _eps(logits: Tensor) -> float:
    """The precision of what led to the logits: cuDNN may choose TF32 (10 bits) for one variant and not for another."""
    if logits.is_cuda and logits.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        return 2.0**-10
    return torch.finfo(logits.dtype).eps


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.double() / temperature, dim=1)


def _fused(network: EarlyExitNetwork) -> list[FusedAuxHead]:
    return [head for head in network.heads if isinstance(head, FusedAuxHead)]
