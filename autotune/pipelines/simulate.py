"""Simulates a pipelined network, step by step as ``model/parallel`` runs it, from measured times.

    micro-batch i on stage s starts once it is received and launched, and the stage's GPU has computed the one before
    its transfer starts once it is computed and handed on, the receiver has handed on its last but one, and the link is
    free

A GPU receives a micro-batch while it computes the one before, and computes while it sends. It does not receive while it
still sends, as both are kernels of one stream. Micro-batches without samples are not computed, but sent as others are.
The host launches a micro-batch, then hands it on, and goes on to the next one, ahead of its GPU. Only where samples are
merged does it wait for the GPU in between; the first stage, which has all samples, launches the next one before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

#: Micro-batches that go through a schedule at once; see ``model/parallel/pipeline/exchange.py``.
MOST_MICRO_BATCHES = 64


@dataclass(frozen=True)
class StageTimes:
    """What one stage takes for a micro-batch, and what becomes of its samples."""

    stage_ms: float
    """For a full micro-batch, heads and, where it merges, gathering included; others take as long."""
    link_ms: float = 0.0
    """For handing a micro-batch to the next stage; of the last stage it does not count."""
    leave: float = 0.0
    """Of the samples that come and are open, the share that is answered here, 0 to 1."""
    merges: bool = False
    """Hands on full micro-batches of samples that are open, instead of each micro-batch as it lies, answered or not."""
    gpus: int = 1
    """They take micro-batches in turn, hand them on in order, and merge as one."""
    launch_ms: float = 0.0
    """What the host takes to launch a micro-batch."""
    hand_on_ms: float = 0.0
    """What it takes for everything else: answers, places, PyTorch's schedule with its sends, and gathering."""

    def __post_init__(self) -> None:
        if not self.stage_ms > 0 or min(self.link_ms, self.launch_ms, self.hand_on_ms) < 0:
            got = f"{self.stage_ms}, {self.link_ms}, {self.launch_ms}, {self.hand_on_ms}"
            raise ValueError(
                f"stage_ms, link_ms, launch_ms, hand_on_ms: got {got}, wants more than 0, and then 0 or more"
            )
        if not 0 <= self.leave <= 1:
            raise ValueError(f"leave: got {self.leave}, wants a share from 0 to 1")
        if self.gpus < 1:
            raise ValueError(f"gpus: got {self.gpus}, wants 1 or more")


class Prediction(NamedTuple):
    """How fast a pipeline is."""

    images_per_s: float
    request_ms: float
    """From the start of a request on the first stage to its last answer; the mean of requests."""
    busy: tuple[float, ...]
    """Of each stage, the share of the time that its GPUs compute."""


def simulate(
    stages: Sequence[StageTimes],
    split_size: int,
    batch: int,
    replicas: int = 1,
    *,
    requests: int = 1,
    fixed_ms: float = 0.0,
) -> Prediction:
    """Predict how fast a pipeline answers.

    Args:
        stages: in their order.
        split_size: samples of a micro-batch.
        batch: samples of a request.
        replicas: of the whole pipeline, which get requests in turn.
        requests: of each replica, that follow one another without a pause; 1: the next one waits for all answers of
            the one before, as with :class:`PipelinedRunner`.
        fixed_ms: what each request takes besides: to be announced, and for the last answers to be collected.

    Raises:
        ValueError: no stages, or a number below 1.
    """
    parts = _samples_by_step(stages, split_size, batch)
    for name, number in (("replicas", replicas), ("requests", requests)):
        if number < 1:
            raise ValueError(f"{name}: got {number}, wants 1 or more")
    clocks = [_Clock(stage, is_first=index == 0) for index, stage in enumerate(stages)]
    request_ms = []
    for _ in range(requests):
        began = None
        for part in parts:
            for clock in clocks:
                clock.launched.clear()
            for step, samples in enumerate(part):
                # a schedule ends, on each rank, once all is sent
                came, told = clocks[0].sent.last if step == 0 else 0.0, 0.0
                for index, clock in enumerate(clocks):
                    later = step + clock.stage.gpus
                    comes = samples[index] > 0, later < len(part) and part[later][index] > 0
                    start, handed, told = clock.compute(step, comes, came, told)
                    began = start if began is None else began
                    if index + 1 == len(clocks):
                        break
                    after = clocks[index + 1]
                    receives = max(after.done.of_gpu_before, after.sent.of_gpu_before)
                    came = max(handed, clock.sent.of_gpu, receives) + clock.stage.link_ms
                    clock.sent.add(came)
        assert began is not None
        request_ms.append(clocks[-1].done.last - began + fixed_ms)
    total = clocks[-1].done.last + requests * fixed_ms
    busy = tuple(ms * requests / total for ms in _gpu_ms(stages, parts))
    return Prediction(replicas * requests * batch / total * 1e3, sum(request_ms) / requests, busy)


def bound(stages: Sequence[StageTimes], split_size: int, batch: int, replicas: int = 1) -> float:
    """Return the images a second that the slowest stage allows: its time x micro-batches with samples / its GPUs."""
    return replicas * batch / max(_gpu_ms(stages, _samples_by_step(stages, split_size, batch))) * 1e3


class _Times:
    """Times in ms, ascending, one a micro-batch, that a stage's GPUs have in turn."""

    def __init__(self, gpus: int) -> None:
        self._latest, self._before, self._next = [0.0] * gpus, [0.0] * gpus, 0
        self.last = 0.0

    @property
    def of_gpu(self) -> float:
        """The latest of the GPU whose turn it is."""
        return self._latest[self._next]

    @property
    def of_gpu_before(self) -> float:
        """The one before that."""
        return self._before[self._next]

    def add(self, time: float) -> None:
        self._before[self._next] = self._latest[self._next]
        self.last = self._latest[self._next] = time
        self._next = (self._next + 1) % len(self._latest)


class _Clock:
    """Of a stage the times at which its GPUs and their hosts are done with each micro-batch."""

    def __init__(self, stage: StageTimes, *, is_first: bool) -> None:
        self.stage, self._launches_ahead = stage, is_first and stage.merges
        self.done, self.sent, self._host = (_Times(stage.gpus) for _ in range(3))
        self.launched: dict[int, float] = {}
        """By step, of micro-batches that are launched ahead."""

    def compute(self, step: int, comes: tuple[bool, bool], came: float, told: float) -> tuple[float, float, float]:
        """Compute for the micro-batch of a step.

        Args:
            step: of the schedule.
            comes: whether this micro-batch, and the next one on the same GPU, have samples.
            came: when it was received.
            told: when the host was told who is in it; 0 if it knows.

        Returns:
            When the GPU starts, when the micro-batch is handed on, and when the next host is told.
        """
        now, host = comes[0], max(self._host.of_gpu, told)
        if step in self.launched:
            launched = self.launched.pop(step)
        else:
            host = max(host, came if self._launches_ahead else 0.0) + self.stage.launch_ms * now
            launched = host
        if self._launches_ahead and comes[1]:
            host += self.stage.launch_ms
            self.launched[step + self.stage.gpus] = host
        start = max(came, launched, self.done.of_gpu)
        self.done.add(max(self.done.last, start + self.stage.stage_ms * now))
        self._host.add((max(host, self.done.last) if self.stage.merges else host) + self.stage.hand_on_ms)
        return start, max(self.done.last, self._host.last), self._host.last if self.stage.merges or told else 0.0


def _gpu_ms(stages: Sequence[StageTimes], parts: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """Return how long the GPUs of each stage compute for a request, on average."""
    computed = [sum(step[index] > 0 for part in parts for step in part) for index in range(len(stages))]
    return [stage.stage_ms * count / stage.gpus for stage, count in zip(stages, computed, strict=True)]


def _samples_by_step(stages: Sequence[StageTimes], size: int, batch: int) -> list[list[tuple[int, ...]]]:
    """Return how many samples each stage computes at each step of each schedule of a request."""
    if not stages:
        raise ValueError("stages: got none, wants one or more")
    for name, number in (("split_size", size), ("batch", batch)):
        if number < 1:
            raise ValueError(f"{name}: got {number}, wants 1 or more")
    staying, parts, open_ = [], [], 1.0
    for stage in stages:
        open_ *= 1.0 - stage.leave  # of what came out where samples were merged last
        staying.append(_Staying(open_))
        open_ = 1.0 if stage.merges else open_
    for first in range(0, batch, MOST_MICRO_BATCHES * size):
        end = min(batch, first + MOST_MICRO_BATCHES * size)
        counts = [min(size, end - place) for place in range(first, end, size)]
        last = len(counts) - 1  # step after which no samples come
        counts += [0] * sum(stage.merges for stage in stages[:-1])
        by_stage = []
        for stage, stay in zip(stages, staying, strict=True):
            by_stage.append(counts)
            if stage.merges:
                counts = _merged([stay.of(count) for count in counts], size, last)
                last += 1
        parts.append(list(zip(*by_stage, strict=True)))
    return parts


class _Staying:
    """Numbers of samples that stay open, so that of all together the share is right to half a sample."""

    def __init__(self, share: float) -> None:
        self._share, self._came, self._stayed = share, 0, 0

    def of(self, samples: int) -> int:
        self._came += samples
        stayed = int(self._came * self._share + 0.5)
        new, self._stayed = stayed - self._stayed, stayed
        return new


def _merged(counts: Sequence[int], size: int, last: int) -> list[int]:
    """Return what comes out of :class:`Merging` at each step."""
    held, out = 0, []
    for step, count in enumerate(counts):
        held += count
        out.append(min(held, size) if held >= size or step >= last else 0)
        held -= out[-1]
    return out


def predicted_images_s(batch: int, split_size: int, pieces: Mapping[str, Any]) -> float:
    """Return the images a second of a measured pipeline, one request at a time, as the simulation has it.

    Args:
        batch: samples of a request.
        split_size: samples of a micro-batch.
        pieces: of a record: ``graph_ms``, ``launch_ms``, ``hand_on_ms`` and ``leave``, a number a stage; ``link_ms``
            and ``merges``, one for each but the last; and ``request_ms`` of one micro-batch, see
            :func:`request_host_ms`.
    """
    stages = _stages_of(pieces)
    return simulate(stages, split_size, batch, fixed_ms=request_host_ms(split_size, pieces)).images_per_s


def request_host_ms(split_size: int, pieces: Mapping[str, Any]) -> float:
    """Return what a request takes besides: how much longer one of one micro-batch takes than by simulation."""
    nobody_leaves = [replace(stage, leave=0.0) for stage in _stages_of(pieces)]
    one_ms = split_size / simulate(nobody_leaves, split_size, split_size).images_per_s * 1e3
    return max(0.0, pieces["request_ms"] - one_ms)


def _stages_of(pieces: Mapping[str, Any]) -> list[StageTimes]:
    open_, stages = 1.0, []
    last = len(pieces["graph_ms"]) - 1
    of_stages = zip(pieces["graph_ms"], pieces["launch_ms"], pieces["hand_on_ms"], pieces["leave"], strict=True)
    for index, (graph, launch, hand_on, share) in enumerate(of_stages):
        leave = min(1.0, share / open_) if open_ > 0 and index < last else 0.0
        link_ms, merges = (0.0, False) if index == last else (pieces["link_ms"][index], pieces["merges"][index])
        stages.append(StageTimes(graph, link_ms, leave, merges, launch_ms=launch, hand_on_ms=hand_on))
        open_ -= share
    return stages
