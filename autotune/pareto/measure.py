"""Accuracy against latency: one network under several sets of thresholds, every runner checked and then timed."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from ...model import EarlyExitNetwork
from ...model.calibration.evaluation import answers_of_all_exits
from ...model.calibration.thresholds import calibrate
from ...model.training.data_sets import Split
from ..bench.variants import BuildContext, BuiltVariant, Factories, Variant, bare_name, catalogue
from ..measuring.cells import NEVER
from ..measuring.correctness import Answer, Comparison, Truth, eager_truth, logits_of_exits, measure_rounding, verdict
from ..measuring.subject import Subject
from ..measuring.timers import Samples, VariantFailed, time_captures

#: What early exit may cost on the validation split, one set of thresholds each; 0.005 is half a percentage point.
DROPS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
#: The network without heads as people run it.
EAGER = "eager-bare@as_is"
#: What leaves early, without its trunk.
RUNNERS = ("overlapped", "polled", "gated")
#: Timed rounds of each variant, at least: the test split is gone through as often as that takes.
LEAST_ROUNDS = 100


class Point(NamedTuple):
    """One set of thresholds."""

    exits: str
    """As records name it."""
    thresholds: tuple[float, ...]
    """Of each head."""


@dataclass
class PointResult:
    """What one variant did at one point."""

    counts: dict[str, int] | None = None
    accuracy: float | None = None
    """Of its own answers on the test split, 0 to 1."""
    samples: Samples | None = None
    mean_host_us: float | None = None
    error: str | None = None


def operating_points(network: EarlyExitNetwork, validation: Split, drops: Sequence[float] = DROPS) -> list[Point]:
    """Return the thresholds that :func:`calibrate` chooses for each drop of accuracy, and before them no exit at all.

    What comes out alike is there once: a small validation split cannot tell some drops apart.
    """
    answers = answers_of_all_exits(network, validation.pixels)
    correct = answers.label == validation.labels
    found = {tuple(1.0 for _ in network.taps): NEVER}
    for drop in drops:
        thresholds = calibrate(answers.confidence[:-1], correct, drop).thresholds
        found.setdefault(thresholds, f"calibrated {100 * drop:g} %")
    return [Point(exits, thresholds) for thresholds, exits in found.items()]


def in_turns(inputs: int) -> list[int]:
    """Return which input each round takes: all of them once in order, then again, shuffled, so that captures change."""
    order = random.Random(0)
    passes = -(-LEAST_ROUNDS // inputs)
    return [*range(inputs), *(place for _ in range(passes - 1) for place in order.sample(range(inputs), inputs))]


def mean_time(host: Sequence[Sequence[float]], places: Sequence[int]) -> float:
    """Return the mean time to the answer, microseconds, untouched by single hiccups of the host.

    Of the rounds whose last sample leaves at one exit, which take the same time, the median counts for each.

    Args:
        host: of each capture the rounds that it was timed in; captures took turns.
        places: of each round the exit at which its last sample leaves.
    """
    by_place = defaultdict(list)
    for turn, place in enumerate(places):
        by_place[place].append(host[turn % len(host)][turn // len(host)])
    return sum(len(us) * median(us) for us in by_place.values()) / len(places)


class Pareto:
    """One network and batch size: captured once, then measured under any thresholds, which are written in place."""

    def __init__(self, subject: Subject, labels: Tensor, trunk: str, factories: Factories | None = None) -> None:
        """Prepare to measure.

        Args:
            subject: its inputs are the test split in batches, the last one filled up.
            labels: [M] int64, of the test split, on the CPU.
            trunk: that runners and the bare graph run on.
            factories: of runners and trunks.
        """
        self._subject, self._labels = subject, labels
        self._context = BuildContext(subject, factories or Factories())
        self._rounding = measure_rounding(subject.network, subject.inputs)
        wanted = {EAGER, bare_name(trunk), *(f"{runner}@{trunk}" for runner in RUNNERS)}
        self.variants = [variant for variant in catalogue(subject.cell) if variant.name in wanted]
        self._turns = in_turns(len(subject.inputs))
        self._captures: dict[str, list[BuiltVariant]] = {}
        self._failed: dict[str, str] = {}
        self._logits = {trunk: self._logits_on(trunk) for trunk in {variant.trunk for variant in self.variants}}
        for variant in self.variants:
            captures = self._captures.setdefault(variant.name, [])
            try:
                for _ in range(variant.captures):
                    captures.append(variant.build(self._context, NEVER))
            except Exception as error:
                self._failed[variant.name] = _one_line(error)

    @property
    def rounds(self) -> int:
        """Timed rounds of each variant."""
        return len(self._turns)

    @property
    def samples(self) -> int:
        """Of the test split."""
        return len(self._labels)

    def notes(self, variant: Variant) -> list[str]:
        """Say what was done to a variant's trunk."""
        return list(self._context.trunk(variant.trunk).notes)

    def close(self) -> None:
        """Free what was captured."""
        for captures in self._captures.values():
            for capture in captures:
                capture.close()
        self._captures.clear()

    def measure(self, point: Point) -> dict[str, PointResult]:
        """Check all variants under the thresholds of ``point``, then time those that answer rightly; by name."""
        with self._subject.thresholds(point.thresholds):
            results = {variant.name: self._check(variant) for variant in self.variants}
            self._time(results)
        return results

    def samples_by_exit(self, point: Point, variant: Variant) -> dict[str, int]:
        """Count how many samples of the test split leave where, by the eager network on the variant's trunk."""
        with self._subject.thresholds(point.thresholds):
            exits = torch.cat([truth.answer.exit_index for truth in self._truths(variant)])[: len(self._labels)]
        names = [*self._subject.network.taps, "classifier"]
        return dict(zip(names, torch.bincount(exits, minlength=len(names)).tolist(), strict=True))

    def _check(self, variant: Variant) -> PointResult:
        """Compare what each round will call with the eager truth; the first pass over the inputs gives the accuracy."""
        if variant.name in self._failed:
            return PointResult(error=self._failed[variant.name])
        captures, truths = self._captures[variant.name], self._truths(variant)
        comparison, labels = Comparison(), []
        try:
            for turn, place in enumerate(self._turns):
                capture = captures[turn % len(captures)]
                answer = capture.answer(capture.call(self._subject.inputs[place]))
                comparison.add(answer, truths[place])
                if turn < len(truths):
                    labels.append(answer.label.clone())  # the next call may write over it
        except Exception as error:
            return PointResult(error=_one_line(error))
        right = torch.cat(labels).cpu()[: len(self._labels)] == self._labels
        counts = comparison.counts()
        return PointResult(counts, right.double().mean().item(), error=verdict(counts))

    def _time(self, results: dict[str, PointResult]) -> None:
        """Time what has no error; what raises meanwhile gets one, and the rest begins again."""
        while right := [name for name, result in results.items() if result.error is None]:
            calls = {name: [capture.call for capture in self._captures[name]] for name in right}
            inputs = [self._subject.inputs[place] for place in self._turns]
            try:
                found = time_captures(calls, inputs, rounds=len(inputs), warm_up=10, repeat=1)
            except VariantFailed as failed:
                results[failed.name].error = _one_line(failed.__cause__ or failed)
                continue
            for variant in self.variants:
                if variant.name in found:
                    lasts = [int(truth.answer.exit_index.max()) for truth in self._truths(variant)]
                    of_variant = results[variant.name]
                    of_variant.samples = found[variant.name]
                    of_variant.mean_host_us = mean_time(
                        of_variant.samples.host, [lasts[place] for place in self._turns]
                    )
            return

    def _logits_on(self, kind: str) -> list[Tensor]:
        """The logits [inputs * N, K] of each exit, as the network on that trunk gives them eagerly, batch by batch."""
        made, subject = self._context.trunk(kind), self._subject
        classifier = None if made.classifier is None else made.classifier.logits
        heads = [head.logits for head in subject.heads]
        by_input = [
            logits_of_exits(
                made.module, subject.network.taps, heads, x.contiguous(memory_format=made.memory_format), classifier
            )
            for x in subject.inputs
        ]
        return [torch.cat(at_exit) for at_exit in zip(*by_input, strict=True)]

    def _truths(self, variant: Variant) -> list[Truth]:
        """What the eager network says about each input on a variant's trunk; without heads, no sample leaves early."""
        logits = self._logits[variant.trunk]
        if not variant.exits_early:
            with self._subject.exits(NEVER):
                truth = eager_truth(logits, self._subject.heads, self._rounding)
        else:
            truth = eager_truth(logits, self._subject.heads, self._rounding)
        answers = zip(*(field.split(self._subject.cell.batch) for field in truth.answer), strict=True)
        others = zip(*(field.split(self._subject.cell.batch) for field in truth[1:]), strict=True)
        return [Truth(Answer(*answer), *other) for answer, other in zip(answers, others, strict=True)]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
