"""The eager network's answers, which every timed variant is compared with, and how far rounding may move them."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import CRITERIA, HeadOutput, decide, decide_in_order
from ...model import EarlyExitNetwork, ExitResult, Trunk
from ...model.answers.exit_result import first_sure
from ...model.heads.head import AuxHead
from ...model.listening.reading import Reading
from ...model.listening.taps import listening


class Expected(NamedTuple):
    """The eager network's answer for a batch of N, and by how much rounding may change it."""

    answer: ExitResult
    """Without probabilities, confidences in float64."""
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


class Comparison:
    """Counts differences over batches; nothing waits for the device until ``counts`` is called."""

    def __init__(self) -> None:
        self._samples = 0
        self._counted: list[Tensor] = []

    def add(self, found: ExitResult, expected: Expected) -> None:
        """Compare one batch.

        Raises:
            ValueError: the answers are for another number of samples.
        """
        wanted = expected.answer
        if found.label.shape != wanted.label.shape:
            raise ValueError(f"answers for {tuple(found.label.shape)} samples, wants {tuple(wanted.label.shape)}")
        elsewhere = found.exit_index != wanted.exit_index
        differs = elsewhere | (found.label != wanted.label)
        classes = expected.possible.shape[1]
        tied = expected.possible.gather(1, found.label.clamp(0, classes - 1)[:, None])[:, 0]
        excused = differs & torch.where(elsewhere, expected.near_threshold, tied)
        off = ~((found.confidence.double() - wanted.confidence).abs() <= expected.slack)  # a NaN is off, too
        self._samples += len(differs)
        counts = (differs, excused, expected.near, off & ~elsewhere)
        self._counted.append(torch.stack([mask.sum() for mask in counts]))

    def counts(self) -> dict[str, int]:
        """Return the counts that a :class:`Record` holds; confidences are compared where the exit is right."""
        total = torch.stack(self._counted).sum(0).tolist() if self._counted else [0, 0, 0, 0]
        names = ("differing", "differing_near", "near", "confidence_off")
        return {"samples": self._samples, **dict(zip(names, total, strict=True))}


def wrong_in_words(counts: dict[str, int]) -> str | None:
    """Return what is wrong with the answers, or None."""
    wrong = counts["differing"] - counts["differing_near"]
    if wrong:
        return f"answers differ from the eager network's: {wrong} of {counts['samples']} samples, beyond rounding"
    if counts["confidence_off"]:
        return f"confidences differ from the eager network's: {counts['confidence_off']} of {counts['samples']} samples"
    return None if counts["samples"] else "nothing was compared"


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
        self._taps, self._heads, self._inputs = network.taps, network.exit_heads, inputs
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
        self._known: dict[tuple[tuple[str, float, float, bool], ...], list[Expected]] = {}

    def truths(self) -> list[Expected]:
        """Return the truth for each input by the rules as they are now."""
        rules = tuple(
            (rule.criterion, rule.threshold, rule.temperature, rule.enabled)
            for rule in (head.rule for head in self._heads)
        )
        if rules not in self._known:
            # of all samples at once: a test split has hundreds of batches of one
            answer, *others = truth_of_logits(self._logits, self._heads, self._rounding)
            batch = len(self._inputs[0])
            parts = (answer.label, answer.confidence, answer.exit_index, *others)
            self._known[rules] = [
                Expected(ExitResult(label, confidence, None, exit_index), *rest)
                for label, confidence, exit_index, *rest in zip(*(part.split(batch) for part in parts), strict=True)
            ]
        return self._known[rules]

    def compare(
        self, answer: Callable[[Tensor], ExitResult], comparison: Comparison, inputs: int | None = None
    ) -> None:
        """Compare answers for the first ``inputs`` (None: for all) under the rules as they are now."""
        for x, truth in list(zip(self._inputs, self.truths(), strict=True))[:inputs]:
            comparison.add(answer(x), truth)

    def samples_by_exit(self) -> dict[str, int]:
        """Count how many samples leave at each tap, and at "classifier"."""
        exits = torch.cat([truth.answer.exit_index for truth in self.truths()])
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
    """Compare the eager network with a copy of it in float64, each head by its own criterion."""
    exact = copy.deepcopy(network).double()
    logit = [0.0] * len(exact.heads) + [0.0]
    confidence = list(logit)
    heads, exact_heads = network.exit_heads, exact.exit_heads
    rules: list[tuple[Tensor | float, str]] = [(head.rule.temperature_tensor, head.rule.criterion) for head in heads]
    rules.append((1.0, "max_prob"))
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
            temperature, criterion = rules[index]
            if CRITERIA[criterion].counts_heads:  # a count, which rounding changes by whole numbers or not at all
                continue
            had, want = (decide(y.double(), temperature, 1.0, criterion).confidence for y in (had, want))
            scale = want.abs().amax().clamp(min=1.0)  # an energy is of the size of logits
            confidence[index] = max(confidence[index], ((had - want).abs().max() + step * scale).item())
    return Rounding(logit, confidence)


def merge(outputs: Sequence[HeadOutput]) -> ExitResult:
    """Let the first sure exit answer for each sample, else the last; in float64."""
    wide = [HeadOutput(None, one.label, one.confidence.double(), one.exit) for one in outputs]
    return first_sure(wide, with_probs=False)


def truth_of_logits(logits: Sequence[Tensor], heads: Sequence[AuxHead], rounding: Rounding) -> Expected:
    """Merge what the exits say, by the heads' rules and criteria as they are now, and look how near others are.

    ``logits`` are [N, K] of every exit, the classifier's last, as a trunk gives them eagerly.
    """
    rules = [(head.rule.temperature_tensor, head.rule.threshold_tensor, head.rule.criterion) for head in heads]
    wide = [at_exit.double() for at_exit in logits]
    outputs = decide_in_order(wide, rules)
    answer = merge(outputs)
    near_threshold = undecided = torch.zeros_like(answer.label, dtype=torch.bool)
    possible, slack = torch.zeros_like(logits[0], dtype=torch.bool), torch.zeros_like(answer.confidence)
    for index, (at_exit, output) in enumerate(zip(wide, outputs, strict=True)):
        tied = at_exit.amax(1, keepdim=True) - at_exit <= ROUNDINGS * rounding.logit[index]  # [N, K]
        off = torch.full_like(slack, ROUNDINGS * rounding.confidence[index])
        if index < len(rules):
            _, threshold, criterion = rules[index]
            undecided = undecided | (tied.sum(1) > 1)  # between two labels, at any head so far
            if CRITERIA[criterion].counts_heads:  # it counts, and a label that is rounded away begins the count anew
                close, off = undecided, index * undecided.double()
            else:
                close = (output.confidence - threshold).abs() <= off
            low, high = CRITERIA[criterion].range
            reached = answer.exit_index >= index
            near_threshold = near_threshold | (reached & close & (low < threshold) & (threshold < high))  # not at ends
        here = answer.exit_index == index
        possible |= here[:, None] & tied
        slack = torch.where(here, off, slack)
    return Expected(answer, near_threshold, possible, slack)


def _eps(logits: Tensor) -> float:
    """Return the precision behind the logits: cuDNN may use TF32 (10 bits) for one variant and not for another."""
    if logits.is_cuda and logits.dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        return 2.0**-10
    return torch.finfo(logits.dtype).eps
