"""Measures accuracy and time of one network under several sets of thresholds, with every runner."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from ...model import EarlyExitNetwork
from ...model.calibration.evaluation import answers_of_all_exits
from ...model.demo.thresholds import choose_thresholds
from ...model.training.data_sets import Split
from ..bench.variants import Variant, VariantCaptures, bare_name, catalogue
from ..measuring.cells import NEVER
from ..measuring.correctness import Comparison, verdict
from ..measuring.failures import Failure
from ..measuring.names import RUNNERS
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

    samples_by_exit: dict[str, int]
    """Samples of the test split that leave at each tap and, last, at the classifier, by the eager network."""
    last_exits: list[int]
    """Exit index of the last sample in each round."""
    counts: dict[str, int] | None = None
    accuracy: float | None = None
    """Accuracy of its own answers on the test split, 0 to 1."""
    samples: Samples | None = None
    mean_host_us: float | None = None
    error: str | None = None


def operating_points(
    network: EarlyExitNetwork, validation: Split, drops: Sequence[float] = DROPS
) -> list[OperatingPoint]:
    """Return the demo's thresholds for each drop of accuracy (:func:`choose_thresholds`), and before them no exit.

    Equal thresholds are there once: a small validation split cannot tell some drops apart.
    """
    answers = answers_of_all_exits(network, validation.pixels)
    correct = answers.label == validation.labels
    found = {tuple(1.0 for _ in network.taps): NEVER}
    for drop in drops:
        thresholds = choose_thresholds(answers.confidence[:-1], correct, drop).thresholds
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
        return list(self._captures.trunk(variant.trunk).notes)

    def close(self) -> None:
        """Free what was captured."""
        self._captures.close()

    def measure(self, point: OperatingPoint) -> dict[str, PointResult]:
        """Check all variants under the thresholds of ``point``, then time those that answer rightly; by name."""
        with self._subject.thresholds(point.thresholds):
            results = {variant.name: self._check(variant) for variant in self.variants}
            self._time(results)
        return results

    def _check(self, variant: Variant) -> PointResult:
        """Compare what each round will call with the eager truth; the first pass over the inputs gives the accuracy."""
        truth = self._captures.truth(variant.trunk)
        with nullcontext() if variant.exits_early else self._subject.exits(NEVER):  # without heads no sample leaves
            truths, leave = truth.truths(), truth.samples_by_exit(self.samples)
        last_exits = [int(one.answer.exit_index.max()) for one in truths]
        result = PointResult(leave, [last_exits[index] for index in self._turns])
        result.error = self._captures.failed.get(variant.name)
        if result.error is not None:
            return result
        captures, comparison, labels = self._captures.built[variant.name], Comparison(), []
        try:
            for turn, index in enumerate(self._turns):
                answer = captures[turn % len(captures)].answer_to(self._subject.inputs[index])
                comparison.add(answer, truths[index])
                if turn < len(truths):
                    labels.append(answer.label.clone())  # the next call may write over it
        except Exception as error:
            result.error = str(Failure.of(error))
            return result
        right = torch.cat(labels).cpu()[: len(self._labels)] == self._labels
        result.counts, result.accuracy = comparison.counts(), right.double().mean().item()
        result.error = verdict(result.counts)
        return result

    def _time(self, results: dict[str, PointResult]) -> None:
        """Time what has no error; what raises meanwhile gets one."""
        inputs = [self._subject.inputs[index] for index in self._turns]

        def timed(left: Mapping[str, PointResult]) -> dict[str, Samples]:
            calls = {name: [capture.call for capture in self._captures.built[name]] for name in left}
            return time_captures(calls, inputs, rounds=len(inputs), warm_up=10, repeat=1)

        def failed(_name: str, result: PointResult, error: BaseException) -> None:
            result.error = str(Failure.of(error))

        right = {name: result for name, result in results.items() if result.error is None}
        for name, samples in (time_those_that_run(right, timed, failed) or {}).items():
            results[name].samples = samples
            results[name].mean_host_us = mean_time(samples.host, results[name].last_exits)
