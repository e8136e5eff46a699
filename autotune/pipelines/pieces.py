"""Times of a pipeline's pieces for one full micro-batch: each stage, its computation alone, and each link.

All processes call this alike; each measures its own stage while the others measure theirs.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...model.parallel.pipeline.runner import PipelinedRunner
from ...model.parallel.pipeline.stage import Stage

#: Micro-batches one after another in a measurement, and measurements, of which the median counts; those of requests.
_REPEAT, _TIMES, _REQUESTS = 10, 5, 25
#: Micro-batches of the two requests whose times are compared.
_STEPS = 2, 8


class Pieces(NamedTuple):
    """Milliseconds for one full micro-batch, of which no sample leaves."""

    graph_ms: list[float]
    """Of each stage's computation, one graph behind another: what the device needs."""
    launch_ms: list[float]
    """Of each stage what the host takes to launch it."""
    hand_on_ms: list[float]
    """What it takes for everything else: answers, places, PyTorch's schedule with its sends, and gathering."""
    link_ms: list[float]
    """Of each link to the next stage: activations sent and received, one behind another."""
    merges: list[bool]
    """Of each stage but the last, whether it merges the samples that stay open."""
    request_ms: float
    """Of a request of this one micro-batch, until the first process has its answers."""


def measure_pieces(runner: PipelinedRunner, example: Tensor, index: int, stages: int) -> Pieces:
    """Measure the pieces of a pipeline where no request is under way.

    Args:
        runner: of this process.
        example: a batch, of a micro-batch's size at least, on its device.
        index: of its stage.
        stages: how many there are.
    """
    stage, size = runner.stage, runner.stage.size
    taken = _taken(stage, example[:size])
    graph = _median_ms(lambda: stage.computed(None, taken), stage.device)
    launch = _median_ms(lambda: stage.computed(None, taken), stage.device, host_alone=True)
    links = []
    for link in range(stages - 1):
        _gathered([], stages)  # none still measures what is before
        links.append(_link_ms(stage, index, link))
    request = _median_ms(partial(runner, example[:size] if runner.is_first else None), stage.device, of_requests=True)
    hand_on = _hand_on_ms(runner, example[:size], taken)
    found = _gathered([graph, launch, hand_on, *links], stages)
    merges = [bool(one) for [one] in _gathered([stage.merges], stages)]
    return Pieces(
        [one[0] for one in found],
        [one[1] for one in found],
        [one[2] for one in found],
        [found[link + 1][3 + link] for link in range(stages - 1)],  # as the one that receives sees it
        merges[:-1],
        request,
    )


def _hand_on_ms(runner: PipelinedRunner, micro_batch: Tensor, taken: Sequence[Tensor]) -> float:
    """Measure a step of a request for which nothing is launched: every micro-batch gets the answers of this one."""
    stage = runner.stage
    few, many = (
        micro_batch.repeat(steps, *[1] * (micro_batch.ndim - 1)) if runner.is_first else None for steps in _STEPS
    )
    with stage.computing_nothing(taken):
        times = [_median_ms(partial(runner, x), stage.device, of_requests=True) for x in (few, many)]
    return max(0.0, times[1] - times[0]) / (_STEPS[1] - _STEPS[0])


def _taken(stage: Stage, micro_batch: Tensor) -> list[Tensor]:
    if stage.is_first:
        return [micro_batch]
    return [torch.zeros_like(each, device=stage.device) for each in stage.takes[1:]]


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


def _gathered(own: list[float], processes: int) -> list[list[float]]:
    found: list[Any] = [None] * processes
    dist.all_gather_object(found, own)
    return found


def _median_ms(
    run: Callable[[], object], device: torch.device, *, of_requests: bool = False, host_alone: bool = False
) -> float:
    times, repeat = [], 1 if of_requests else _REPEAT
    for _ in range(1 + (_REQUESTS if of_requests else _TIMES)):
        _wait(device)
        began = time.perf_counter()
        for _ in range(repeat):
            run()
        if not host_alone:
            _wait(device)
        times.append((time.perf_counter() - began) * 1e3 / repeat)
    _wait(device)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
