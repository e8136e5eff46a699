"""The benchmark: every variant of a cell is built, checked against the eager network, then timed between the others."""

import gc
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...model.trunk.fused_convolution import fastest_convolutions
from ..measuring.cells import NEVER
from ..measuring.correctness import Comparison, Rounding, Truth, eager_truth, logits_of_exits, measure_rounding, verdict
from ..measuring.environment import clocks
from ..measuring.failures import DeviceLost
from ..measuring.subject import Subject
from ..measuring.timers import VariantFailed, time_captures
from ..records.record import Record, append_record, utc_now
from ..records.spread import p99, spread
from ..records.summaries import summary
from .selection import BenchOptions, PatternRun
from .variants import AS_IS, BuildContext, BuiltVariant, Variant, bare_name, segments_name, truncated_name

#: Back-to-back calls last about this long, microseconds, within the bounds below.
BLOCK_US = 2000.0
REPEATS = (3, 20)
#: Requests of each round for the host time: a 99th percentile needs many.
REQUESTS = 20


def run_cell(
    subject: Subject, runs: Sequence[PatternRun], options: BenchOptions, done: Callable[[], None] = lambda: None
) -> None:
    """Measure the runs of one cell and append their records; ``done`` is called after each.

    Every variant gets the algorithms of cuDNN that the "cudnn" trunk gets, not ours alone.

    Raises:
        DeviceLost: after a record that says which variant it was.
    """
    torch.compiler.reset()  # what was compiled for other cells would count against the limit on recompilations
    with fastest_convolutions(subject.cell.batch):
        bench = _CellBench(subject, options)
        try:
            for pattern_run in runs:
                with subject.exits(pattern_run.pattern):
                    bench.measure(pattern_run)
                done()
        finally:
            bench.close()


@dataclass
class _Checked:
    """A variant whose captures answer rightly."""

    variant: Variant
    captures: list[BuiltVariant]
    counts: dict[str, int]


@dataclass
class _CellBench:
    """Builds, checks and times; captures are kept from one exit pattern to the next."""

    subject: Subject
    options: BenchOptions
    context: BuildContext = field(init=False)
    rounding: Rounding = field(init=False)
    _built: dict[str, list[BuiltVariant]] = field(default_factory=dict)
    _failed: dict[str, str] = field(default_factory=dict)
    _logits: dict[str, list[list[torch.Tensor]]] = field(default_factory=dict)
    _truths: dict[tuple[str, str, int], Truth] = field(default_factory=dict)
    _lost: bool = False
    """Nothing can be freed any more."""

    def __post_init__(self) -> None:
        self.context = BuildContext(self.subject, self.options.factories)
        self.rounding = measure_rounding(self.subject.network, self.subject.inputs)

    def measure(self, pattern_run: PatternRun) -> None:
        """Measure one pattern_run and append its records."""
        run = secrets.token_hex(6)
        checked: dict[str, _Checked] = {}
        try:
            for variant in pattern_run.variants:
                self.options.say(f"{pattern_run.cell}; exits {pattern_run.pattern}: {variant.name}", False)
                right = self._build_and_check(pattern_run, variant, run)
                if right is not None:
                    checked[variant.name] = right
            self.options.say(f"{pattern_run.cell}; exits {pattern_run.pattern}: timing {len(checked)} variants", False)
            self._time(pattern_run, checked, run)
        finally:
            for variant in pattern_run.variants:
                if variant.per_pattern:
                    self._drop(variant.name)

    def close(self) -> None:
        """Free what was captured."""
        for name in list(self._built):
            self._drop(name)
        self._logits.clear()
        self._truths.clear()
        if not self._lost:
            _free()

    def _build_and_check(self, pattern_run: PatternRun, variant: Variant, run: str) -> _Checked | None:
        """Return the variant if all its captures answer rightly; else append a record of the failure."""
        counts: dict[str, int] | None = None
        error = self._failed.get(variant.name)
        if error is None:
            try:
                if variant.name not in self._built:
                    captures = self._built.setdefault(variant.name, [])
                    for _ in range(variant.captures):
                        captures.append(variant.build(self.context, pattern_run.pattern))
                counts = self._compare(pattern_run, variant)
                error = verdict(counts)
            except Exception as failure:
                error = _one_line(failure)
                if not variant.per_pattern:
                    self._failed[variant.name] = error  # it would fail in the same way for the next pattern
        if error is None and counts is not None:
            return _Checked(variant, self._built[variant.name], counts)
        self._fail(pattern_run, variant, run, str(error), counts)
        return None

    def _fail(
        self, pattern_run: PatternRun, variant: Variant, run: str, error: str, counts: dict[str, int] | None = None
    ) -> None:
        """Record a failure at once, and see whether the device is still there."""
        self.options.say(f"{pattern_run.cell}; exits {pattern_run.pattern}: {variant.name} FAILED: {error}", True)
        record = self._record(
            pattern_run, variant, run, protocol=self._protocol(variant, None), correctness=counts, error=error
        )
        append_record(self.options.out, record)
        try:
            self._drop(variant.name)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            _free()
        except Exception as lost:
            self._lost = True
            raise DeviceLost(f"{variant.name}: {error}; the CUDA context is lost ({_one_line(lost)})") from lost

    def _compare(self, pattern_run: PatternRun, variant: Variant) -> dict[str, int]:
        """Compare every capture with the eager truth on the same trunk, for all inputs.

        Where no sample leaves early nothing shows what the heads say. A variant that is measured there alone is also
        compared with two inputs for an exit at each tap.
        """
        pattern = pattern_run.pattern if variant.exits_early else NEVER
        only_there = not (variant.exits or variant.mixed)
        of_heads = self.subject.network.taps if variant.exits_early and only_there else ()
        comparison = Comparison()
        for exits in (pattern, *of_heads):
            for place, x in enumerate(self.subject.inputs if exits == pattern else self.subject.inputs[:2]):
                truth = self._truth(variant.trunk, exits, place)
                with self.subject.exits(exits if variant.exits_early else pattern_run.pattern):
                    for capture in self._built[variant.name]:
                        comparison.add(capture.answer(capture.call(x)), truth)
        return comparison.counts()

    def _truth(self, trunk: str, pattern: str, place: int) -> Truth:
        """Return the truth for one input; the logits it follows from are computed once a trunk."""
        if trunk not in self._logits:
            made, taps = self.context.trunk(trunk), self.subject.network.taps
            heads = [head.logits for head in self.subject.heads]
            classifier = None if made.classifier is None else made.classifier.logits
            self._logits[trunk] = [
                logits_of_exits(made.module, taps, heads, x, classifier) for x in self.subject.inputs
            ]
        key = (trunk, pattern, place)
        if key not in self._truths:
            with self.subject.exits(pattern):
                self._truths[key] = eager_truth(self._logits[trunk][place], self.subject.heads, self.rounding)
        return self._truths[key]

    def _samples_by_exit(self, trunk: str, pattern: str) -> dict[str, int]:
        """Count how many samples of all inputs leave at each exit by the truth."""
        truths = [self._truth(trunk, pattern, place) for place in range(len(self.subject.inputs))]
        names = [*self.subject.network.taps, "classifier"]
        exits = torch.cat([truth.answer.exit_index for truth in truths])
        return dict(zip(names, torch.bincount(exits, minlength=len(names)).tolist(), strict=True))

    def _time(self, pattern_run: PatternRun, checked: dict[str, _Checked], run: str) -> None:
        """Time what answers rightly and append its records; what raises meanwhile fails, and the rest begins again."""
        while checked:
            calls = {name: [capture.call for capture in one.captures] for name, one in checked.items()}
            warm_up = max(len(captures) for captures in calls.values())
            try:
                repeat = self._repeat(checked)
                samples = time_captures(
                    calls, self.subject.inputs, rounds=self.options.rounds, warm_up=warm_up, repeat=repeat,
                    requests=REQUESTS,
                )  # fmt: skip
            except VariantFailed as failure:
                failed = checked.pop(failure.name)
                self._fail(pattern_run, failed.variant, run, _one_line(failure.__cause__ or failure), failed.counts)
                continue
            found = clocks(self.subject.example.device)
            times = {name: (_of_requests(one.host), summary(one.device)) for name, one in samples.items()}
            for name, one in checked.items():
                host, device = times[name]
                record = self._record(
                    pattern_run,
                    one.variant,
                    run,
                    protocol={
                        **self._protocol(one.variant, repeat, warm_up),
                        "samples_by_exit": self._samples_by_exit(one.variant.trunk, pattern_run.pattern),
                    },
                    clocks_found=found,
                    host_us=host,
                    device_us=device,
                    paired=paired_with(one.variant, times),
                    correctness=one.counts,
                )
                append_record(self.options.out, record)
            return

    def _repeat(self, checked: dict[str, _Checked]) -> int:
        """Choose how many calls follow back to back, one number for all, by what the first of the variants takes."""
        name = bare_name(AS_IS) if bare_name(AS_IS) in checked else next(iter(checked))
        call = [checked[name].captures[0].call]
        samples = time_captures({name: call}, self.subject.inputs[:1], rounds=3, warm_up=2, repeat=3)
        taken = spread(samples[name].device[0]).median
        return max(REPEATS[0], min(REPEATS[1], round(BLOCK_US / taken)))

    def _protocol(self, variant: Variant, repeat: int | None, warm_up: int | None = None) -> dict[str, Any]:
        return {
            "rounds": self.options.rounds,
            "warm_up": warm_up,
            "repeat": repeat,
            "requests": REQUESTS,
            "captures": variant.captures,
            "inputs": len(self.subject.inputs),
            "order": "interleaved, shuffled every round",
            "l2": "warm, by the variant itself",
            "clocks": "as found",
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }

    def _record(
        self,
        pattern_run: PatternRun,
        variant: Variant,
        run: str,
        *,
        clocks_found: dict[str, float] | None = None,
        **rest: Any,
    ) -> Record:
        trunk = self.context.trunks.get(variant.trunk)
        captures = enumerate(self._built.get(variant.name, []), start=1)
        return Record(
            kind="bench",
            cell=pattern_run.cell.as_json(),
            exits=pattern_run.pattern,
            variant=variant.name,
            run=run,
            utc=utc_now(),
            environment={**self.options.environment, "clocks": clocks_found},
            notes=[
                *([variant.note] if variant.note else []),
                *(f"capture {number}: {capture.note}" for number, capture in captures if capture.note),
                *(trunk.notes if trunk else ()),
            ],
            **rest,
        )

    def _drop(self, name: str) -> None:
        for capture in self._built.pop(name, []):
            if not self._lost:
                capture.close()


def paired_with(variant: Variant, times: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the baselines of a variant that were timed in the same run, with the ratios to them.

    Args:
        variant: whose numbers are divided by theirs.
        times: host and device summaries of the run, by variant.
    """
    pairs = []
    roles = {
        "bare": bare_name(variant.trunk),
        "truncated": truncated_name(variant.trunk),
        "segments": segments_name(variant.trunk),
        "plain": variant.plain,
    }
    for role, baseline in roles.items():
        if baseline not in times:
            continue
        pair: dict[str, Any] = {"role": role, "variant": baseline}
        for kind, own, other in zip(("host", "device"), times[variant.name], times[baseline], strict=True):
            pair[f"{kind}_us"] = other["median"]
            pair[f"{kind}_ratio"] = own["median"] / other["median"]
        pairs.append(pair)
    return pairs


def _of_requests(by_capture: list[list[float]]) -> dict[str, Any]:
    return {**summary(by_capture), "p99": p99([value for values in by_capture for value in values])}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
