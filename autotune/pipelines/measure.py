"""Measures all variants in turns, in every process alike: built, checked against the eager network, timed, recorded."""

import faulthandler
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.trunk.fused_convolution import fastest_convolutions
from ..measuring.cells import NEVER
from ..measuring.eager_truth import Comparison, EagerTruth, measure_rounding, wrong_in_words
from ..measuring.failures import Failure
from ..measuring.progress import Begins
from ..measuring.subject import Subject, build_subject
from ..measuring.timers import time_request
from ..records.record import Record
from ..records.summaries import as_json, network_record, summary
from .pieces import GpuTimeline, PieceTimes, bound_images_s, measure_pieces, record_timeline, wait_for
from .variants import CUT, HEADS, NAIVE, ONE_HEAD, TUTORIAL, Case, PipelineOptions, Variants, cases_of

#: Samples that say how far rounding moves answers.
_ROUNDING_SAMPLES = 32
#: NCCL's own thread looks at exchanges that have ended for some time, by calls that a capture does not allow.
_SETTLE_S = 0.5
#: Seconds after which the timeline of a request is given up.
_TIMELINE_S = 60.0
#: The kinds of the records, of times and of timelines.
KIND, TIMELINE = "pipeline", "gpus"


@dataclass
class Timed:
    """What was measured of a case."""

    us: list[list[float]] = field(default_factory=list)
    """Microseconds of single requests, [captures][rounds]."""
    counts: dict[str, int] | None = None
    error: str | None = None


@dataclass
class Results:
    """What the first process has measured."""

    cases: dict[Case, Timed]
    times: dict[int, PieceTimes] = field(default_factory=dict)
    """Of pipelines with heads after every stage, by the split size."""
    timelines: dict[Case, GpuTimeline] = field(default_factory=dict)
    notes: dict[Case, str] = field(default_factory=dict)
    run: str = field(default_factory=lambda: secrets.token_hex(6))
    """Identifier shared by its records."""


def measure_pipelines(
    options: PipelineOptions, device: torch.device, rank: int, begins: Begins, timed: Callable[[Results], None]
) -> Results:
    """Measure together with the other processes of the default process group.

    Args:
        options: the same in all.
        device: of this process.
        rank: of this process.
        begins: told what comes.
        timed: gets all results but the timelines, which are recorded last.

    Raises:
        RankFailed, StageFailed: a pipeline failed; those of the first process's own that fail are results.
    """
    with ExitStack() as opened:
        opened.enter_context(fastest_convolutions(max(options.split_sizes)))
        begins("building the network", 0.0)
        bench = _Bench(options, build_subject(options.cell, device), rank, begins)
        bench.build(opened)
        bench.check()
        bench.time()
        timed(bench.results)
        bench.record()
        return bench.results


class _Bench:
    """One process's part of the measurement; all of them go through the same steps in the same order."""

    def __init__(self, options: PipelineOptions, subject: Subject, rank: int, begins: Begins) -> None:
        self._options, self._subject, self._rank, self._begins = options, subject, rank, begins
        device, second = subject.example.device, None
        _share_parameters(subject)
        if rank == 0:
            second = torch.device("cuda", 1) if device.type == "cuda" else device
        self._wait = partial(wait_for, device, *([] if second is None else [second]))
        self._variants = Variants(options, subject, second)
        self.results = Results({case: Timed() for case in cases_of(options)})

    def build(self, opened: ExitStack) -> None:
        """Build all pipelines, and measure their stages and links."""
        opened.enter_context(self._subject.exits(NEVER))
        for kind in (ONE_HEAD, HEADS):
            self._begins(f"building {kind}", 0.05)
            self._variants.build(kind, opened.enter_context)
        runners = self._variants.runners
        for case in self.results.cases:
            if case.together and case.split_size is not None:
                self.results.notes[case] = " ".join(runners[case.variant, case.split_size].describe().splitlines())
        for (kind, size), runner in runners.items():
            if kind == HEADS:
                self._begins(f"stages and links, micro-batches of {size}", 0.3)
                example, stages = self._subject.example, self._options.processes
                self.results.times[size] = measure_pieces(runner, example, self._rank, stages)

    def check(self) -> None:
        """Compare the answers of every case with the eager network's; those that differ are not timed."""
        self._capture()
        network, inputs = self._subject.network, self._subject.inputs
        trunks = self._variants.trunks  # of the first process
        rounding = measure_rounding(network, [inputs[0][:_ROUNDING_SAMPLES]]) if trunks else None
        for batch in self._options.batches:
            cut = [x[:batch] for x in inputs]
            truths = {kind: EagerTruth(network, trunk, cut, rounding) for kind, trunk in trunks.items()}
            for case, result in self.results.cases.items():
                if case.batch == batch:
                    self._begins(f"checking {case.name}, batch {batch}", 0.4)
                    self._check_one(case, result, cut, truths.get(case.trunk))

    def _check_one(self, case: Case, result: Timed, inputs: list[Tensor], truth: EagerTruth | None) -> None:
        if truth is None:
            for x in inputs:
                self._variants.call_of(case)(x)
            return
        comparison = Comparison()
        with self._failing(case, result, (RuntimeError, ValueError)):
            truth.compare(partial(self._variants.answer_of, case), comparison)
            result.counts = comparison.counts()
            result.error = wrong_in_words(result.counts)

    @contextmanager
    def _failing(self, case: Case, result: Timed, errors: tuple[type[Exception], ...]) -> Iterator[None]:
        """Keep an error as the result of a case, unless the other processes are in it, too."""
        try:
            yield
        except errors as error:
            if case.together:
                raise
            result.error = str(Failure.of(error))

    def time(self) -> None:
        """Time single requests of all cases in turns, in fresh captures; pipelines that answer wrongly, too."""
        order = random.Random(0)  # the same in all processes
        cases, captures = list(self.results.cases), self._options.captures
        for capture in range(captures):
            self._begins(f"timing {len(cases)} cases, capture {capture + 1}", 0.5 + 0.4 * capture / captures)
            self._capture()
            for result in self.results.cases.values():
                result.us.append([])
            for turn in range(-(-self._options.rounds // captures)):
                for case in order.sample(cases, len(cases)):
                    self._time_one(case, turn)

    def _capture(self) -> None:
        """Capture afresh all that is captured in this process."""
        self._wait()
        time.sleep(_SETTLE_S)
        self._variants.capture()

    def _time_one(self, case: Case, turn: int) -> None:
        call, result, inputs = self._variants.call_of(case), self.results.cases[case], self._subject.inputs
        x = inputs[turn % len(inputs)][: case.batch]
        if result.error is None or case.together:
            with self._failing(case, result, (RuntimeError,)):
                call(x)  # untimed: caches
                self._wait()
                result.us[-1].append(time_request(call, x, wait=self._wait)[1])

    def record(self) -> None:
        """Record one request of each way to run, with its fastest split size, of the largest batch, on all GPUs."""
        if not self._subject.example.is_cuda:
            return
        for case in self._fastest():
            self._begins(f"timeline of {case.name}", 0.95)
            call = partial(self._variants.call_of(case), self._subject.example[: case.batch])
            # a profiler that hangs would keep all processes: it is said where, and all end
            faulthandler.dump_traceback_later(_TIMELINE_S, exit=True)
            found = record_timeline(call, self._wait)
            faulthandler.cancel_dump_traceback_later()
            if found is not None:
                self.results.timelines[case] = found

    def _fastest(self) -> list[Case]:
        """Return the cases whose timelines are recorded; of split sizes the fastest, as the first process has seen."""
        fastest: dict[str, tuple[float, int]] = {}
        for index, (case, timed) in enumerate(self.results.cases.items()):
            of_interest = case.variant in (NAIVE, TUTORIAL, HEADS) and case.batch == max(self._options.batches)
            if of_interest and any(timed.us):
                median = statistics.median(chain.from_iterable(timed.us))
                fastest[case.variant] = min(fastest.get(case.variant, (median, index)), (median, index))
        chosen = [[index for _, index in fastest.values()]]
        dist.broadcast_object_list(chosen, 0)
        cases = list(self.results.cases)
        return [cases[index] for index in chosen[0]]


def _share_parameters(subject: Subject) -> None:
    """Give all processes the first one's network: batch norms' statistics differ from GPU to GPU in their last bits."""
    with torch.no_grad():
        for tensor in (*subject.network.parameters(), *subject.network.buffers()):
            dense: Any = tensor.detach().contiguous()
            dist.broadcast(dense, 0)
            tensor.copy_(dense)


def pipeline_records(options: PipelineOptions, results: Results, environment: Mapping[str, Any]) -> list[Record]:
    """Return the records of all cases of one run, failures included."""
    return [_record(options, results, case, timed, environment) for case, timed in results.cases.items()]


def timeline_records(options: PipelineOptions, results: Results, environment: Mapping[str, Any]) -> list[Record]:
    """Return the records of the timelines of one run."""
    return [
        network_record(
            TIMELINE, options.cell_of(case.batch).as_json(), case.name, environment, run=results.run,
            protocol=_protocol(options, case), measured=as_json(timeline),
        )
        for case, timeline in results.timelines.items()
    ]  # fmt: skip


def _record(
    options: PipelineOptions, results: Results, case: Case, timed: Timed, environment: Mapping[str, Any]
) -> Record:
    fields: dict[str, Any] = {}
    if timed.error is None:
        images_s = summary([[case.batch / us * 1e6 for us in rounds] for rounds in timed.us])
        pieces: dict[str, Any] = {"split_size": case.split_size}
        if case.split_size is not None:
            times = results.times[case.split_size]
            pieces |= {"pieces": times, "bound_images_s": bound_images_s(case.batch, case.split_size, times)}
        fields = {
            "host_us": as_json(summary(timed.us)),
            "measured": as_json({"images_s": images_s, "batch": case.batch, **pieces}),
        }
    note = results.notes.get(case)
    return network_record(
        KIND, options.cell_of(case.batch).as_json(), case.name, environment, run=results.run,
        protocol=_protocol(options, case), correctness=timed.counts, error=timed.error, notes=[note] if note else [],
        **fields,
    )  # fmt: skip


def _protocol(options: PipelineOptions, case: Case) -> dict[str, Any]:
    return {
        "rounds": options.rounds,
        "captures": options.captures,
        "processes": options.processes if case.together else 1,
        "devices": options.processes,
        "cut": CUT,
        "order": "shuffled each round, an untimed request before each",
    }
