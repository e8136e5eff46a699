"""Timelines of one request: when each GPU computes, copies or waits in NCCL, by torch.profiler in every process."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ..measuring.profiled_requests import exported_trace
from ..records.intervals import merged

#: Categories of a trace's events that are work of a GPU.
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
#: Kernels that are this far apart, microseconds, are drawn as one.
_APART_US = 2.0


class GpuTimeline(NamedTuple):
    """One request on all GPUs; microseconds since its first kernel or copy began."""

    span_us: float
    computes: list[list[tuple[float, float]]]
    """Of each GPU the intervals with kernels or copies, in order."""
    exchanges: list[list[tuple[float, float]]]
    """Of each GPU the intervals with kernels of NCCL, which send, receive or wait for the other side."""


def record_timeline(call: Callable[[], Any] | None, wait: Callable[[], None]) -> GpuTimeline | None:
    """Profile one request, the second of two; all processes call this alike, and the first one gets the timeline.

    Args:
        call: makes a request, or takes part in it; None: another process does it all.
        wait: waits for the devices that work for it.
    """
    if call is not None:
        call()
    wait()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        _meet()  # all profilers are on before it begins, and off after it has ended
        if call is not None:
            call()
        wait()
        _meet()
    with tempfile.TemporaryDirectory() as folder:
        own = work_of(exported_trace(profiler, Path(folder, "trace.json")))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return timeline_of([one for of_process in found for one in of_process]) if dist.get_rank() == 0 else None


def _meet() -> None:
    """Wait for all processes without a kernel of NCCL."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None)


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
