"""The eager network's answers, which every timed variant is compared with, and how far rounding may move them."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...model import EarlyExitNetwork, FusedAuxHead, Trunk
from ...model.reading import Reading
from ...model.taps import listening
from .correctness import Answer, Comparison, Truth

#: Two right answers may differ by this many times the rounding error that the eager network was measured to have: each
#: of them may be off by twice that (DESIGN.md's bound), on either side.
ROUNDINGS = 4.0


class Rounding(NamedTuple):
    """Largest errors of the eager network against itself in float64, of each exit over the inputs."""

    logit: list[float]
    confidence: list[float]


class EagerTruth:
    """The truth for some inputs on one trunk, under whatever rules the heads have when it is asked for.

    The logits of all exits are computed once. Truths are kept for each set of rules.
    """

    def __init__(
        self, network: EarlyExitNetwork, trunk: Trunk, inputs: Sequence[Tensor], rounding: Rounding | None = None
    ) -> None:
        """Run the network eagerly on every input, batches [N, ...] of one size, with its backbone as ``trunk``.

        ``rounding`` is the network's; None: it is measured with these inputs.
        """
        self._taps, self._heads, self._inputs = network.taps, network.fused_heads, inputs
        self._rounding = measure_rounding(network, inputs) if rounding is None else rounding
        heads = [head.logits for head in self._heads]
        classifier = None if trunk.classifier is None else trunk.classifier.logits
        by_input = (
            logits_of_exits(
                trunk.module,
                self._taps,
                heads,
                x.contiguous(memory_format=trunk.memory_format),
                classifier,
                trunk.reading,
            )
            for x in inputs
        )
        self._logits = [torch.cat(at_exit) for at_exit in zip(*by_input, strict=True)]
        self._known: dict[tuple[tuple[float, float, bool], ...], list[Truth]] = {}

    def truths(self) -> list[Truth]:
        """Return the truth for each input by the rules as they are now."""
        rules = tuple((head.rule.threshold, head.rule.temperature, head.rule.enabled) for head in self._heads)
        if rules not in self._known:
            # of all samples at once: a test split has hundreds of batches of one
            answer, *others = truth_of_logits(self._logits, self._heads, self._rounding)
            batch = len(self._inputs[0])
            answers = zip(*(field.split(batch) for field in answer), strict=True)
            rest = zip(*(field.split(batch) for field in others), strict=True)
            self._known[rules] = [Truth(Answer(*one), *more) for one, more in zip(answers, rest, strict=True)]
        return self._known[rules]

    def compare(self, answer: Callable[[Tensor], Answer], comparison: Comparison, inputs: int | None = None) -> None:
        """Compare answers for the first ``inputs`` (None: for all) under the rules as they are now."""
        for x, truth in list(zip(self._inputs, self.truths(), strict=True))[:inputs]:
            comparison.add(answer(x), truth)

    def samples_by_exit(self, samples: int | None = None) -> dict[str, int]:
        """Count how many of the first ``samples`` (None: of all) leave at each tap, and at "classifier"."""
        exits = torch.cat([truth.answer.exit_index for truth in self.truths()])[:samples]
        names = [*self._taps, "classifier"]
        return dict(zip(names, torch.bincount(exits, minlength=len(names)).tolist(), strict=True))


def logits_of_exits(
    module: nn.Module, taps: Sequence[str], heads: Sequence[Callable[[Tensor], Tensor]], x: Tensor,
    classifier: Callable[[Tensor], Tensor] | None = None, reading: Reading | None = None,
) -> list[Tensor]:  # fmt: skip
    """Run eagerly and return the logits [N, K] of every exit, the classifier's last."""
    logits: list[Tensor] = []
    with torch.no_grad(), listening(module, taps, lambda index, y: logits.append(heads[index](y)), reading):
        final = module(x)
    return [*logits, final if classifier is None else classifier(final)]


def measure_rounding(network: EarlyExitNetwork, inputs: Sequence[Tensor]) -> Rounding:
    """Compare the eager network with a copy of it in float64."""
    exact = copy.deepcopy(network).double()
    logit = [0.0] * len(exact.heads) + [0.0]
    confidence = list(logit)
    heads, exact_heads = network.fused_heads, exact.fused_heads
    temperatures = [*(head.rule.temperature for head in heads), 1.0]
    for x in inputs:
        of_heads = [head.logits for head in heads]
        found = logits_of_exits(network.backbone, network.taps, of_heads, x, reading=network.reading)
        wide = x.double() if x.is_floating_point() else x
        of_exact = [head.logits for head in exact_heads]
        wanted = logits_of_exits(exact.backbone, exact.taps, of_exact, wide, reading=exact.reading)
        for index, (had, want) in enumerate(zip(found, wanted, strict=True)):
            step = 2.0 * _eps(had)
            off = (had.double() - want).abs().max() + step * want.abs().max()
            logit[index] = max(logit[index], off.item())
            had, want = (_softmax(y, temperatures[index]).amax(1) for y in (had, want))
            confidence[index] = max(confidence[index], (had - want).abs().max().item() + step)
    return Rounding(logit, confidence)


def truth_of_logits(logits: Sequence[Tensor], heads: Sequence[FusedAuxHead], rounding: Rounding) -> Truth:
    """Let the first sure exit answer for each sample, by the heads' rules as they are now.

    ``logits`` are [N, K] of every exit, the classifier's last, as a trunk gives them eagerly.
    """
    samples, device = len(logits[0]), logits[0].device
    open_, near_threshold = (torch.full((samples,), value, device=device) for value in (True, False))
    possible = torch.zeros_like(logits[0], dtype=torch.bool)
    label, exit_index = (torch.zeros(samples, dtype=torch.int64, device=device) for _ in range(2))
    confidence, slack = (torch.zeros(samples, dtype=torch.float64, device=device) for _ in range(2))
    for index, at_exit in enumerate(logits):
        rule = heads[index].rule if index < len(heads) else None
        sure = _softmax(at_exit, rule.temperature if rule else 1.0).amax(1)
        leaves = open_.clone()
        if rule is not None:
            threshold = float(rule.threshold_tensor.item())
            leaves &= sure > threshold
            if 0.0 < threshold < 1.0:  # beyond the ends of the range nothing can be rounded
                near_threshold |= open_ & ((sure - threshold).abs() <= ROUNDINGS * rounding.confidence[index])
        below_first = at_exit.double().amax(1, keepdim=True) - at_exit.double()  # [N, K]
        possible |= leaves[:, None] & (below_first <= ROUNDINGS * rounding.logit[index])
        label = torch.where(leaves, at_exit.argmax(1), label)
        exit_index = torch.where(leaves, index, exit_index)
        confidence = torch.where(leaves, sure, confidence)
        slack = torch.where(leaves, ROUNDINGS * rounding.confidence[index], slack)
        open_ &= ~leaves
    return Truth(Answer(label, confidence, exit_index), near_threshold, possible, slack)


def _eps(logits: Tensor) -> float:
    """Return the precision behind the logits: cuDNN may use TF32 (10 bits) for one variant and not for another."""
    if logits.is_cuda and logits.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        return 2.0**-10
    return torch.finfo(logits.dtype).eps


def _softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.softmax(logits.double() / temperature, dim=1)
