"""Bound of a pipeline's throughput, from the measured times of its stages and links.

A request of m micro-batches passes stage 0, link 0, stage 1, ...; whoever is the slowest works without a break:

    time >= sum of all times + (m - 1) x the longest of them
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.parallel.pipeline.runner import PipelinedRunner
from ...model.parallel.pipeline.stage import Stage

#: Micro-batches one after another in a measurement, and measurements, of which the median counts.
_REPEAT, _TIMES = 10, 5


class PipelineTimes(NamedTuple):
    """Milliseconds for one full micro-batch."""

    graph_ms: list[float]
    """Of each stage's computation, one graph behind another."""
    link_ms: list[float]
    """Of each link to the next stage: activations sent and received, one behind another."""


def bound_images_s(batch: int, split_size: int, times: PipelineTimes) -> float:
    """Return the largest throughput in images a second, of requests of ``batch`` samples, one at a time."""
    passed = [*times.graph_ms, *times.link_ms]
    return 1e3 * batch / (sum(passed) + (-(-batch // split_size) - 1) * max(passed))


def measure_times(runner: PipelinedRunner, example: Tensor, index: int, stages: int) -> PipelineTimes:
    """Measure a pipeline where no request is under way; all processes call this alike, each measures its own stage.

    Args:
        runner: of this process.
        example: a batch, of a micro-batch's size at least, on its device.
        index: of its stage.
        stages: how many there are.
    """
    stage = runner.stage
    taken = [example[: stage.size]]
    if not stage.is_first:
        taken = [torch.zeros_like(each, device=stage.device) for each in stage.takes[1:]]
    own, found = [_median_ms(lambda: stage.computed(None, taken), stage.device)], list[Any]([None] * stages)
    for link in range(stages - 1):
        dist.all_gather_object(found, own)  # none still measures what is before
        own.append(_link_ms(stage, index, link))
    dist.all_gather_object(found, own)
    received = [found[link + 1][1 + link] for link in range(stages - 1)]  # as the one that receives sees it
    return PipelineTimes([one[0] for one in found], received)


def _link_ms(stage: Stage, index: int, link: int) -> float:
    """Send, or receive, what stage ``link`` hands over; other processes wait."""
    if index not in (link, link + 1):
        return 0.0
    sends = index == link
    tensors = [torch.zeros_like(each, device=stage.device) for each in (stage.hands if sends else stage.takes)]
    operation, peer = (dist.isend, link + 1) if sends else (dist.irecv, link)

    def exchange() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, each, peer) for each in tensors]):
            work.wait()

    return _median_ms(exchange, stage.device)


def _median_ms(run: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(1 + _TIMES):
        _wait(device)
        began = time.perf_counter()
        for _ in range(_REPEAT):
            run()
        _wait(device)
        times.append((time.perf_counter() - began) * 1e3 / _REPEAT)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
