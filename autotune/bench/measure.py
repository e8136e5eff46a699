"""Measures the variants of a cell: each is built, checked against the eager network, then timed between the others."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...model.basics.energy import energy_counter, joules_a_call
from ...model.trunk.timed_convolutions import fastest_convolutions
from ..measuring.cells import AS_IS, NEVER, Cell
from ..measuring.eager_truth import Comparison, EagerTruth, wrong_in_words
from ..measuring.environment import clocks, release_memory
from ..measuring.failures import DeviceLost, Failure
from ..measuring.progress import Begins
from ..measuring.subject import Subject
from ..measuring.timers import PROTOCOL, Samples, time_captures, time_those_that_run
from ..records.record import Record, append_record
from ..records.summaries import p99, percentiles, summary
from .variants import BuiltVariant, Variant, VariantCaptures, bare_name, truncated_name


@dataclass(frozen=True)
class BenchOptions:
    """Options of a run of the benchmark: what it measures, and where records go."""

    out: Path
    environment: dict[str, Any]
    rounds: int
    wanted: tuple[str, ...] = ()
    """Globs of variant names; none: all that are measured by default."""
    fresh: bool = False
    """Measure again what is already recorded."""
    exits: tuple[str, ...] = ()
    """Globs of exit patterns; none: all of a cell."""
    kind: str = "bench"
    """Of the records."""


@dataclass
class PatternRun:
    """One exit pattern of one cell, whose variants are measured in one interleaved run."""

    cell: Cell
    pattern: str
    variants: list[Variant]
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    """Identifier shared by its records."""


#: Requests of each round for the host time: a 99th percentile needs many.
REQUESTS = 20
#: Calls whose energy is measured go on for so many seconds.
_ENERGY_S = 1.0
#: How a variant is timed that failed before.
_TOO_EARLY = {"warm_up": None, "repeat": None}

#: Back-to-back calls last about this long, microseconds, within the bounds below.
BLOCK_US = 2000.0
REPEATS = (3, 20)


def run_cell(
    subject: Subject, runs: Sequence[PatternRun], options: BenchOptions, begins: Begins = lambda what, share: None
) -> None:
    """Measure a cell under several exit patterns and append the records.

    Every variant gets the algorithms of cuDNN that the "cudnn" trunk gets, not ours alone.

    Raises:
        DeviceLost: after a record that says which variant it was.
    """
    torch.compiler.reset()  # what was compiled for other cells would count against the limit on recompilations
    with fastest_convolutions(subject.cell.batch):
        bench = _CellBench(subject, options, begins)
        try:
            for number, run in enumerate(runs):
                bench.done = number / len(runs)
                with subject.exits(run.pattern):
                    bench.measure(run)
        finally:
            bench.close()


class _Checked(NamedTuple):
    """A variant whose captures answer rightly."""

    variant: Variant
    captures: list[BuiltVariant]
    counts: dict[str, int]
    truth: EagerTruth
    """Of the first capture."""


class _CellBench:
    """Builds, checks and times; captures are kept from one exit pattern to the next."""

    def __init__(self, subject: Subject, options: BenchOptions, begins: Begins) -> None:
        self.subject, self.options, self.begins = subject, options, begins
        self.done = 0.0  # share of the cell, for ``begins``
        self.captures = VariantCaptures(subject)
        self._lost = False  # if True, nothing can be freed any more

    def measure(self, run: PatternRun) -> None:
        """Measure one exit pattern, whose rules are in force, and append its records."""
        checked: dict[str, _Checked] = {}
        try:
            for variant in run.variants:
                self.begins(f"exits {run.pattern}: {variant.name}", self.done)
                right = self._build_and_check(run, variant)
                if right is not None:
                    checked[variant.name] = right
            self.begins(f"exits {run.pattern}: timing {len(checked)} variants", self.done)
            self._time(run, checked)
        finally:
            for variant in run.variants:
                if variant.per_pattern:
                    self._drop(variant.name)

    def close(self) -> None:
        """Free what was captured."""
        if not self._lost:
            self.captures.close()
            release_memory()

    def _drop(self, name: str) -> None:
        if not self._lost:
            self.captures.drop(name)

    def _build_and_check(self, run: PatternRun, variant: Variant) -> _Checked | None:
        """Return the variant if all its captures answer rightly; else append a record of the failure."""
        counts: dict[str, int] | None = None
        error = self.captures.failed.get(variant.name)
        if error is None:
            try:
                captures = self.captures.build(variant, run.pattern)
                truths = [self.captures.truth_of(variant, capture) for capture in captures]
                counts = self._compare(run, variant, captures, truths)
                error = wrong_in_words(counts)
                if error is None:
                    return _Checked(variant, captures, counts, truths[0])
            except Exception as failure:
                error = str(Failure.of(failure))
                if not variant.per_pattern:
                    self.captures.failed[variant.name] = error  # it would fail in the same way for the next pattern
        self._fail(run, variant, error, counts)
        return None

    def _fail(self, run: PatternRun, variant: Variant, error: str, counts: dict[str, int] | None) -> None:
        """Record a failure at once, and find out whether the device is still there."""
        self.begins(f"exits {run.pattern}: {variant.name} FAILED: {error}", self.done)
        self._append(run, variant, correctness=counts, error=error)
        try:
            self._drop(variant.name)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            release_memory()
        except Exception as lost:
            self._lost = True
            raise DeviceLost(f"{variant.name}: {error}; the CUDA context is lost ({Failure.of(lost)})") from lost

    def _compare(
        self, run: PatternRun, variant: Variant, captures: Sequence[BuiltVariant], truths: Sequence[EagerTruth]
    ) -> dict[str, int]:
        """Compare every capture with the eager truth on its trunk, for all inputs; trunks are checked as they are made.

        Where no sample leaves early nothing shows what the heads say. A variant that is measured there alone is also
        compared with two inputs for an exit at each tap.
        """
        pattern = run.pattern if variant.exits_early else NEVER
        only_there = not (variant.exits or variant.mixed)
        of_heads = self.subject.network.taps if variant.exits_early and only_there else ()
        comparison = Comparison()
        for exits in (pattern, *of_heads):
            with self.subject.exits(exits):
                for capture, truth in zip(captures, truths, strict=True):
                    truth.compare(capture.answer_to, comparison, None if exits == pattern else 2)
        return comparison.counts()

    def _time(self, run: PatternRun, checked: dict[str, _Checked]) -> None:
        """Time what answers rightly and append its records; what raises meanwhile is recorded as failed."""

        def timed(left: Mapping[str, _Checked]) -> tuple[dict[str, Any], dict[str, Samples]]:
            calls = {name: [capture.call for capture in one.captures] for name, one in left.items()}
            how: dict[str, Any] = {
                "repeat": self._repeat(left),
                "warm_up": max(len(captures) for captures in calls.values()),
            }
            rounds = self.options.rounds
            return how, time_captures(calls, self.subject.inputs, rounds=rounds, requests=REQUESTS, **how)

        def failed(_name: str, one: _Checked, error: BaseException) -> None:
            self._fail(run, one.variant, str(Failure.of(error)), one.counts)

        found = time_those_that_run(checked, timed, failed)
        if found is None:
            return
        how, samples = found
        clocks_found = clocks(self.subject.example.device)
        times = {
            # of single requests: a 99th percentile of means of several would say nothing
            name: ({**summary(one.host), "p99": p99([us for of in one.host for us in of])}, summary(one.device))
            for name, one in samples.items()
        }
        read = energy_counter(self.subject.example.device)
        for name, one in checked.items():
            host, device = times[name]
            call, inputs = one.captures[0].call, self.subject.inputs
            joules = None if read is None else joules_a_call(call, inputs, device["median"], read, _ENERGY_S)
            self._append(
                run, one.variant, {**how, "samples_by_exit": one.truth.samples_by_exit()}, clocks_found, joules,
                host_us=host, device_us=device, paired=paired_with(one.variant, times), correctness=one.counts,
            )  # fmt: skip

    def _repeat(self, checked: Mapping[str, _Checked]) -> int:
        """Choose how many calls follow back to back, one number for all, by what the first of the variants takes."""
        name = bare_name(AS_IS) if bare_name(AS_IS) in checked else next(iter(checked))
        call = [checked[name].captures[0].call]
        samples = time_captures({name: call}, self.subject.inputs[:1], rounds=3, warm_up=2, repeat=3)
        taken = percentiles(samples[name].device[0]).median
        return max(REPEATS[0], min(REPEATS[1], round(BLOCK_US / taken)))

    def _append(
        self, run: PatternRun, variant: Variant, how: Mapping[str, Any] = _TOO_EARLY,
        clocks_found: dict[str, float] | None = None, joules: float | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        built = self.captures.built.get(variant.name, [])
        trunk = built[0].trunk if built and built[0].trunk else self.captures.trunks.get(variant.trunk)
        notes = [variant.note] if variant.note else []
        notes += [f"capture {number}: {one.note}" for number, one in enumerate(built, start=1) if one.note]
        protocol = {
            "rounds": self.options.rounds, **how, "requests": REQUESTS, "captures": variant.captures,
            "inputs": len(self.subject.inputs), **PROTOCOL, "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }  # fmt: skip
        first = [one.first_answer_s for one in built if one.first_answer_s is not None]
        measured: dict[str, Any] = {"first_answer_s": [round(seconds, 3) for seconds in first]} if first else {}
        if joules is not None:
            measured["joules"] = round(joules, 6)
        record = Record(
            self.options.kind, run.cell.as_json(), variant.name, run.id,
            {**self.options.environment, "clocks": clocks_found}, protocol, exits=run.pattern,
            notes=[*notes, *(trunk.notes if trunk else ())], measured=measured or None, **fields,
        )  # fmt: skip
        append_record(self.options.out, record)


def paired_with(variant: Variant, times: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the baselines of a variant that were timed in the same run, with the ratios to them.

    ``times`` are summaries of host and device, by variant.
    """
    pairs = []
    roles = {
        "bare": bare_name(variant.trunk),
        "truncated": truncated_name(variant.trunk),
        "plain": variant.plain,
    }
    for role, baseline in roles.items():
        if baseline is None or baseline not in times:
            continue
        pair: dict[str, Any] = {"role": role, "variant": baseline}
        for kind, own, other in zip(("host", "device"), times[variant.name], times[baseline], strict=True):
            pair[f"{kind}_us"] = other["median"]
            pair[f"{kind}_ratio"] = own["median"] / other["median"]
        pairs.append(pair)
    return pairs
