"""Measures accuracy and time of one network under several sets of thresholds, with every runner."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from ...model import EarlyExitNetwork
from ...model.calibration.evaluation import answers_of_all_exits
from ...model.calibration.thresholds import calibrate
from ...model.training.data_sets import Split
from ..bench.captures import VariantCaptures
from ..bench.variants import RUNNERS, Variant, bare_name, catalogue
from ..measuring.cells import NEVER
from ..measuring.correctness import Comparison, Truth, verdict
from ..measuring.failures import Failure
from ..measuring.subject import Subject
from ..measuring.timers import Samples, time_captures, time_those_that_run

#: Losses of accuracy allowed on the validation split, one set of thresholds each; 0.005 is half a percentage point.
DROPS = (0.0, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
#: The network without heads as people run it.
EAGER = "eager-bare@as_is"
#: Timed rounds of each variant, at least: the test split is gone through as often as that takes.
LEAST_ROUNDS = 100


class OperatingPoint(NamedTuple):
    """One set of thresholds."""

    exits: str
    """Name of the exit pattern in records."""
    thresholds: tuple[float, ...]
    """One for each head."""


@dataclass
class PointResult:
    """Accuracy and times of one variant under one set of thresholds, or the error that prevented them."""

    counts: dict[str, int] | None = None
    accuracy: float | None = None
    """Accuracy of its own answers on the test split, 0 to 1."""
    samples: Samples | None = None
    mean_host_us: float | None = None
    error: str | None = None


def operating_points(
    network: EarlyExitNetwork, validation: Split, drops: Sequence[float] = DROPS
) -> list[OperatingPoint]:
    """Return the thresholds that :func:`calibrate` chooses for each drop of accuracy, and before them no exit at all.

    Equal thresholds are there once: a small validation split cannot tell some drops apart.
    """
    answers = answers_of_all_exits(network, validation.pixels)
    correct = answers.label == validation.labels
    found = {tuple(1.0 for _ in network.taps): NEVER}
    for drop in drops:
        thresholds = calibrate(answers.confidence[:-1], correct, drop).thresholds
        found.setdefault(thresholds, f"calibrated {100 * drop:g} %")
    return [OperatingPoint(exits, thresholds) for thresholds, exits in found.items()]


def in_turns(inputs: int) -> list[int]:
    """Return which input each round takes: all of them once in order, then again, shuffled, so that captures change."""
    order = random.Random(0)
    passes = -(-LEAST_ROUNDS // inputs)
    return [*range(inputs), *(index for _ in range(passes - 1) for index in order.sample(range(inputs), inputs))]


def mean_time(host: Sequence[Sequence[float]], last_exits: Sequence[int]) -> float:
    """Return the mean time to the answer, microseconds, untouched by single hiccups of the host.

    Of the rounds whose last sample leaves at one exit, which take the same time, the median counts for each.

    Args:
        host: microseconds of each capture's rounds; captures took turns.
        last_exits: of each round the exit index of its last sample.
    """
    by_exit = defaultdict(list)
    for turn, exit_index in enumerate(last_exits):
        by_exit[exit_index].append(host[turn % len(host)][turn // len(host)])
    return sum(len(us) * median(us) for us in by_exit.values()) / len(last_exits)


class Pareto:
    """One network and batch size: captured once, then measured under any thresholds, which are written in place."""

    def __init__(self, subject: Subject, labels: Tensor, trunk: str) -> None:
        """Capture all variants; those that fail are left out of every measurement.

        Args:
            subject: its inputs are the test split in batches, the last one filled up.
            labels: [M] int64, of the test split, on the CPU.
            trunk: that runners and the bare graph run on.
        """
        self._subject, self._labels = subject, labels
        self._captures = VariantCaptures(subject)
        wanted = {EAGER, bare_name(trunk), *(f"{runner}@{trunk}" for runner in RUNNERS)}
        self.variants = [variant for variant in catalogue(subject.cell) if variant.name in wanted]
        self._turns = in_turns(len(subject.inputs))
        self.rounds = len(self._turns)
        """Timed rounds of each variant."""
        self.samples = len(labels)
        """Samples of the test split."""
        for variant in self.variants:
            try:
                self._captures.build(variant, NEVER)
            except Exception as error:
                self._captures.failed[variant.name] = str(Failure.of(error))

    def notes(self, variant: Variant) -> list[str]:
        """Return what was done to a variant's trunk, in sentences."""
        return list(self._captures.context.trunk(variant.trunk).notes)

    def close(self) -> None:
        """Free what was captured."""
        self._captures.close()

    def measure(self, point: OperatingPoint) -> dict[str, PointResult]:
        """Check all variants under the thresholds of ``point``, then time those that answer rightly; by name."""
        with self._subject.thresholds(point.thresholds):
            results = {variant.name: self._check(variant) for variant in self.variants}
            self._time(results)
        return results

    def samples_by_exit(self, point: OperatingPoint, variant: Variant) -> dict[str, int]:
        """Count how many samples of the test split leave where, by the eager network on the variant's trunk."""
        with self._subject.thresholds(point.thresholds), self._exits_of(variant):
            return self._captures.context.truth(variant.trunk).samples_by_exit(self.samples)

    def _truths(self, variant: Variant) -> list[Truth]:
        """Return the truth for each input by the rules in force."""
        with self._exits_of(variant):
            return self._captures.context.truth(variant.trunk).truths()

    def _exits_of(self, variant: Variant) -> AbstractContextManager[None]:
        """Let no sample leave early in a variant without heads."""
        return nullcontext() if variant.exits_early else self._subject.exits(NEVER)

    def _check(self, variant: Variant) -> PointResult:
        """Compare what each round will call with the eager truth; the first pass over the inputs gives the accuracy."""
        if variant.name in self._captures.failed:
            return PointResult(error=self._captures.failed[variant.name])
        captures, truths = self._captures.built[variant.name], self._truths(variant)
        comparison, labels = Comparison(), []
        try:
            for turn, index in enumerate(self._turns):
                answer = captures[turn % len(captures)].answer_to(self._subject.inputs[index])
                comparison.add(answer, truths[index])
                if turn < len(truths):
                    labels.append(answer.label.clone())  # the next call may write over it
        except Exception as error:
            return PointResult(error=str(Failure.of(error)))
        right = torch.cat(labels).cpu()[: len(self._labels)] == self._labels
        counts = comparison.counts()
        return PointResult(counts, right.double().mean().item(), error=verdict(counts))

    def _time(self, results: dict[str, PointResult]) -> None:
        """Time what has no error; what raises meanwhile gets one."""
        inputs = [self._subject.inputs[index] for index in self._turns]

        def timed(left: Mapping[str, PointResult]) -> dict[str, Samples]:
            calls = {name: [capture.call for capture in self._captures.built[name]] for name in left}
            return time_captures(calls, inputs, rounds=len(inputs), warm_up=10, repeat=1)

        def failed(_name: str, result: PointResult, error: BaseException) -> None:
            result.error = str(Failure.of(error))

        right = {name: result for name, result in results.items() if result.error is None}
        found = time_those_that_run(right, timed, failed) or {}
        for variant in self.variants:
            if variant.name in found:
                lasts = [int(truth.answer.exit_index.max()) for truth in self._truths(variant)]
                result = results[variant.name]
                result.samples = found[variant.name]
                result.mean_host_us = mean_time(result.samples.host, [lasts[index] for index in self._turns])
