"""Pieces of a pipelined request: times of stages and links with the bound by them, and when each GPU computes.

A request of m micro-batches passes stage 0, link 0, stage 1, ...; whoever is the slowest works without a break:

    time >= sum of all times + (m - 1) x the longest of them
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ...model.parallel.pipeline.runner import PipelinedRunner
from ...model.parallel.pipeline.stage import Stage
from ..measuring.profiled_requests import exported_trace
from ..measuring.timers import time_request
from ..records.intervals import merged

#: Micro-batches one after another in a measurement, and measurements, of which the median counts.
_REPEAT, _TIMES = 10, 5
#: Categories of a trace's events that are work of a GPU.
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
#: Kernels that are this far apart, microseconds, are drawn as one.
_APART_US = 2.0


class PieceTimes(NamedTuple):
    """Milliseconds for one full micro-batch."""

    graph_ms: list[float]
    """Of each stage's computation, one graph behind another."""
    link_ms: list[float]
    """Of each link to the next stage: activations sent and received, one behind another."""


def bound_images_s(batch: int, split_size: int, times: PieceTimes) -> float:
    """Return the largest throughput in images a second, of requests of ``batch`` samples, one at a time."""
    passed = [*times.graph_ms, *times.link_ms]
    return 1e3 * batch / (sum(passed) + (-(-batch // split_size) - 1) * max(passed))


def measure_pieces(runner: PipelinedRunner, example: Tensor, index: int, stages: int) -> PieceTimes:
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
    own = [_median_ms(lambda: stage.computed(None, taken), stage.device)]
    for link in range(stages - 1):
        gathered(own)  # none still measures what is before
        own.append(_link_ms(stage, index, link))
    found = gathered(own)
    received = [found[link + 1][1 + link] for link in range(stages - 1)]  # as the one that receives sees it
    return PieceTimes([one[0] for one in found], received)


def gathered(own: object) -> list[Any]:
    """Wait for all processes, without a kernel of NCCL, and return what each of them gave."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


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
    def repeated() -> None:
        for _ in range(_REPEAT):
            run()

    times = []
    for _ in range(1 + _TIMES):
        wait_for(device)
        times.append(time_request(repeated, wait=lambda: wait_for(device))[1] / 1e3 / _REPEAT)
    return statistics.median(times[1:])


def wait_for(*devices: torch.device) -> None:
    """Wait for those of the devices that are CUDA's."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class GpuTimeline(NamedTuple):
    """One request on all GPUs; microseconds since its first kernel or copy began."""

    span_us: float
    computes: list[list[tuple[float, float]]]
    """Of each GPU the intervals with kernels or copies, in order."""
    exchanges: list[list[tuple[float, float]]]
    """Of each GPU the intervals with kernels of NCCL, which send, receive or wait for the other side."""


def record_timeline(call: Callable[[], Any], wait: Callable[[], None]) -> GpuTimeline | None:
    """Profile one request, the second of two; all processes call this alike, and the first one gets the timeline.

    Args:
        call: makes a request, or takes part in it.
        wait: waits for the devices that work for it.
    """
    call()
    wait()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        gathered(None)  # all profilers are on before it begins, and off after it has ended
        call()
        wait()
        gathered(None)
    with tempfile.TemporaryDirectory() as folder:
        found = gathered(work_of(exported_trace(profiler, Path(folder, "trace.json"))))
    return timeline_of([one for of_process in found for one in of_process]) if dist.get_rank() == 0 else None


def work_of(trace: Mapping[str, Any]) -> list[tuple[int, bool, float, float]]:
    """Return of all work in a trace its GPU, whether it is NCCL's, begin and end, microseconds of the system's clock.

    The clock is the same for all processes of a host.
    """
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    return [
        (
            int(event["args"]["inDevice" if "inDevice" in event["args"] else "device"]),  # the former of peers' copies
            event["name"].startswith("nccl"),
            base + float(event["ts"]),
            base + float(event["ts"]) + float(event["dur"]),
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _WORK
    ]


def timeline_of(work: list[tuple[int, bool, float, float]]) -> GpuTimeline | None:
    """Return the timeline of what all processes found; None if there was nothing."""
    if not work:
        return None
    first, last = min(begin for *_, begin, _ in work), max(end for *_, end in work)
    gpus = range(max(gpu for gpu, *_ in work) + 1)

    def of(gpu: int, nccl: bool) -> list[tuple[float, float]]:
        wider = [
            (begin - first, end - first + _APART_US)
            for where, is_nccl, begin, end in work
            if (where, is_nccl) == (gpu, nccl)
        ]
        return [(round(begin, 1), round(end - _APART_US, 1)) for begin, end in merged(wider)]

    return GpuTimeline(last - first, [of(gpu, False) for gpu in gpus], [of(gpu, True) for gpu in gpus])
