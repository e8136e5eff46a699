"""Measures all variants of a plan in turns, in every process alike: built, checked against the eager network, timed."""

import faulthandler
import random
import secrets
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.trunk.fused_convolution import fastest_convolutions
from ..measuring.cells import NEVER
from ..measuring.eager_truth import Answer, Comparison, EagerTruth, measure_rounding, wrong_in_words
from ..measuring.failures import Failure
from ..measuring.progress import Begins
from ..measuring.subject import Subject, build_subject
from .bound import PipelineTimes, measure_times
from .plan import CUT, PipelinePlan
from .timelines import GpuTimeline, record_timeline
from .variants import HEADS, NAIVE, ONE_HEAD, TUTORIAL, Baselines, Case, Pipelines, call_of, cases_of

#: Samples that say how far rounding moves answers.
_ROUNDING_SAMPLES = 32
#: NCCL's own thread looks at exchanges that have ended for some time, by calls that a capture does not allow.
_SETTLE_S = 0.5
#: Seconds after which the timeline of a request is given up.
_TIMELINE_S = 60.0


@dataclass
class Timed:
    """What was measured of a case."""

    seconds: list[list[float]] = field(default_factory=list)
    """Of single requests, [captures][rounds]."""
    counts: dict[str, int] | None = None
    error: str | None = None


@dataclass
class Results:
    """What the first process has measured."""

    cases: dict[Case, Timed]
    times: dict[int, PipelineTimes]
    """Of pipelines with heads after every stage, by the split size."""
    timelines: dict[Case, GpuTimeline]
    notes: dict[Case, str]
    run: str = field(default_factory=lambda: secrets.token_hex(6))
    """Identifier shared by its records."""


def measure_pipelines(
    plan: PipelinePlan, device: torch.device, rank: int, begins: Begins, timed: Callable[[Results], None]
) -> Results:
    """Measure a plan together with the other processes of the default process group.

    Args:
        plan: the same in all.
        device: of this process.
        rank: of this process.
        begins: told what comes.
        timed: gets all results but the timelines, which are recorded last.

    Raises:
        RankFailed, StageFailed: a pipeline failed; those of the first process's own that fail are results.
    """
    with ExitStack() as opened:
        opened.enter_context(fastest_convolutions(max(plan.split_sizes)))
        begins("building the network", 0.0)
        bench = _Bench(plan, build_subject(plan.cell, device), rank, begins)
        bench.build(opened)
        bench.check()
        bench.time()
        timed(bench.results)
        bench.record()
        return bench.results


class _Bench:
    """One process's part of the measurement; all of them go through the same steps in the same order."""

    def __init__(self, plan: PipelinePlan, subject: Subject, rank: int, begins: Begins) -> None:
        self._plan, self._subject, self._rank, self._begins = plan, subject, rank, begins
        self._wait_for = [subject.example.device]
        _share_parameters(subject)
        self._pipelines = Pipelines(plan, subject)
        self._baselines: Baselines | None = None
        if rank == 0:
            second = torch.device("cuda", 1) if subject.example.is_cuda else subject.example.device
            self._wait_for.append(second)
            self._baselines = Baselines(plan, subject, second)
        cases = {case: Timed() for case in cases_of(plan)}
        self.results = Results(cases, {}, {}, {})

    def build(self, opened: ExitStack) -> None:
        """Build all pipelines, and measure their stages and links."""
        opened.enter_context(self._subject.exits(NEVER))
        for kind in (ONE_HEAD, HEADS):
            self._begins(f"building {kind}", 0.05)
            self._pipelines.build(kind, opened.enter_context)
        for case in self.results.cases:
            if case.together and case.split_size is not None:
                said = self._pipelines.runners[case.variant, case.split_size].describe()
                self.results.notes[case] = " ".join(said.splitlines())
        for (kind, size), runner in self._pipelines.runners.items():
            if kind == HEADS:
                self._begins(f"stages and links, micro-batches of {size}", 0.3)
                self.results.times[size] = measure_times(
                    runner, self._subject.example, self._rank, self._plan.processes
                )

    def check(self) -> None:
        """Compare the answers of every case with the eager network's; those that differ are not timed."""
        self._capture()
        rounding = (
            None if self._rank else measure_rounding(self._subject.network, [self._subject.example[:_ROUNDING_SAMPLES]])
        )
        for batch in self._plan.batches:
            truths: dict[str, EagerTruth] = {}
            inputs = [x[:batch] for x in self._subject.inputs]
            if self._baselines is not None:
                truths = {
                    kind: EagerTruth(self._subject.network, trunk, inputs, rounding)
                    for kind, trunk in self._baselines.trunks.items()
                }
            for case, result in self.results.cases.items():
                if case.batch == batch:
                    self._begins(f"checking {case.name}, batch {batch}", 0.4)
                    self._check_one(case, result, inputs, truths.get(case.trunk))

    def _check_one(self, case: Case, result: Timed, inputs: list[Tensor], truth: EagerTruth | None) -> None:
        call = call_of(case, self._pipelines, self._baselines)
        if truth is None:
            if call is not None:  # takes part
                for x in inputs:
                    call(x)
            return
        comparison, taps = Comparison(), self._subject.network.taps

        def answer(x: Tensor) -> Answer:
            assert call is not None and self._baselines is not None
            if not case.together:
                return self._baselines.answer_of(case, x)
            found = Answer.of(call(x))
            if case.variant == ONE_HEAD:  # counts its own exits: the one at the cut, and the classifier
                last = len(taps)
                found = found._replace(exit_index=torch.where(found.exit_index == 0, taps.index(CUT), last))
            return found

        try:
            truth.compare(answer, comparison)
        except (RuntimeError, ValueError) as error:
            if case.together:  # the other processes are in it, too
                raise
            result.error = str(Failure.of(error))
            return
        result.counts = comparison.counts()
        result.error = wrong_in_words(result.counts)

    def time(self) -> None:
        """Time single requests of all cases in turns, in fresh captures; pipelines that answer wrongly, too."""
        order = random.Random(0)  # the same in all processes
        cases = list(self.results.cases)
        for capture in range(self._plan.captures):
            self._begins(f"timing {len(cases)} cases, capture {capture + 1}", 0.5 + 0.4 * capture / self._plan.captures)
            self._capture()
            for result in self.results.cases.values():
                result.seconds.append([])
            for turn in range(-(-self._plan.rounds // self._plan.captures)):
                for case in order.sample(cases, len(cases)):
                    self._time_one(case, turn)

    def _capture(self) -> None:
        """Capture afresh all that is captured in this process."""
        self._wait()
        time.sleep(_SETTLE_S)
        self._pipelines.capture()
        if self._baselines is not None:
            self._baselines.capture(self._plan.batches)

    def _time_one(self, case: Case, turn: int) -> None:
        call, result = call_of(case, self._pipelines, self._baselines), self.results.cases[case]
        if call is None or (result.error is not None and not case.together):
            return
        inputs = self._subject.inputs
        x = inputs[turn % len(inputs)][: case.batch]
        try:
            call(x)  # untimed: caches
            self._wait()
            began = time.perf_counter()
            call(x)
            self._wait()
        except RuntimeError as error:
            if case.together:
                raise
            result.error = str(Failure.of(error))
            return
        result.seconds[-1].append(time.perf_counter() - began)

    def _wait(self) -> None:
        if self._wait_for[0].type == "cuda":
            for device in self._wait_for:
                torch.cuda.synchronize(device)

    def record(self) -> None:
        """Record one request of each way to run, with its fastest split size, of the largest batch, on all GPUs."""
        if self._wait_for[0].type != "cuda":
            return
        for case in self._fastest():
            self._begins(f"timeline of {case.name}", 0.95)
            call = call_of(case, self._pipelines, self._baselines)
            x = self._subject.example[: case.batch]
            # a profiler that hangs would keep all processes: it is said where, and all end
            faulthandler.dump_traceback_later(_TIMELINE_S, exit=True)
            found = record_timeline(None if call is None else partial(call, x), self._wait)
            faulthandler.cancel_dump_traceback_later()
            if found is not None:
                self.results.timelines[case] = found

    def _fastest(self) -> list[Case]:
        """Return the cases whose timelines are recorded; of split sizes the fastest, as the first process has seen."""
        fastest: dict[str, tuple[float, int]] = {}
        for index, (case, timed) in enumerate(self.results.cases.items()):
            of_interest = case.variant in (NAIVE, TUTORIAL, HEADS) and case.batch == max(self._plan.batches)
            if of_interest and any(timed.seconds):
                median = statistics.median(chain.from_iterable(timed.seconds))
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
