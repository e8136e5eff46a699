"""Requests under torch.profiler: records a trace, and reads launches, API calls and device time per request from it."""

import bisect
import errno
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function, schedule
from torch.profiler import profile as torch_profile

from ...model.basics.files import replacing
from ..records.intervals import length, merged
from .cuda_calls import ALLOCATIONS, ANNOTATION, LAUNCHES, SYNCHRONISATIONS, plain_name

#: Requests before any that count: compilation, cuDNN's choice of algorithms, the allocator.
WARM_UP = 10


@dataclass(frozen=True)
class ApiCalls:
    """The calls of one function of the CUDA API."""

    name: str
    by_request: tuple[int, ...]
    """Calls in each request."""
    total_us: float
    """Host time of all of them, microseconds."""

    @property
    def calls(self) -> float:
        """Calls per request."""
        return sum(self.by_request) / len(self.by_request)

    @property
    def host_us(self) -> float:
        """Host time per request, microseconds, with the profiler on, which adds to it."""
        return self.total_us / len(self.by_request)


@dataclass(frozen=True)
class RequestProfile:
    """Launches, calls and device time of a request, as means over several; times are microseconds."""

    requests: int
    api: tuple[ApiCalls, ...]
    """Calls of the host between the begin and the return of a request, most host time first."""
    kernels: float
    """Kernels that run on the device, per request, those of graphs among them."""
    copies: float
    """Copies on the device, between devices or to and from the host, per request."""
    fills: float
    """Memsets on the device, per request."""
    kernel_us: float
    """Device time per request, summed over its kernels: more than passes when kernels overlap."""
    busy_us: float
    """Device time per request during which at least one kernel runs: the union of the kernels' intervals."""

    def calls_by_request(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the calls of these API functions together, in each request."""
        rows = [row.by_request for row in self.api if row.name in names]
        return tuple(map(sum, zip(*rows, strict=True))) if rows else (0,) * self.requests


def profile_requests(call: Callable[[Tensor], object], x: Tensor, requests: int, trace_file: Path) -> RequestProfile:
    """Profile so many requests for ``x``, each from an idle device, after a warm-up that is not counted.

    The Chrome trace replaces ``trace_file``; chrome://tracing and ui.perfetto.dev open it.
    """
    profile = request_profile(record_trace(call, x, requests, trace_file))
    if profile.requests != requests:
        raise RuntimeError(f"{trace_file}: holds {profile.requests} of {requests} requests; the profiler lost the rest")
    return profile


def record_trace(call: Callable[[Tensor], object], x: Tensor, requests: int, trace_file: Path) -> dict[str, Any]:
    """Profile requests as ``profile_requests`` does, and return the content of the Chrome trace."""
    # The first requests under a profiler pay for its own set-up: its warm-up phase records them and throws them away.
    phases = schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch_profile(activities=activities(x), schedule=phases, acc_events=True) as profiler:
        for _ in range(WARM_UP):
            call(x)
        _wait_for_device(x.device)
        profiler.step()
        for _ in range(requests):
            with record_function(ANNOTATION):
                kept = call(x)
            _wait_for_device(x.device)
            del kept
    with replacing(trace_file) as unfinished:
        content = exported_trace(profiler, unfinished)
    return content


def exported_trace(profiler: torch_profile, file: Path) -> dict[str, Any]:
    """Write what a profiler recorded as a Chrome trace, and return its content.

    Raises:
        OSError: what was written is incomplete, of which the profiler says nothing.
    """
    profiler.export_chrome_trace(str(file))
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"), strict=False)
    except ValueError:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file)) from None
    return content


def activities(x: Tensor) -> list[ProfilerActivity]:
    """Return the profiler's activities for calls with such an input."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if x.is_cuda else [])]


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def request_profile(trace: Mapping[str, Any]) -> RequestProfile:
    """Count what a Chrome trace of torch.profiler holds about the requests annotated in it.

    API calls count when they begin within a request. Whatever the device ran counts, for it runs after the call that
    launched it has returned: a trace is to hold requests and nothing else on the device.

    Raises:
        ValueError: no request is annotated.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    requests = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == ANNOTATION
    )
    if not requests:
        raise ValueError(f"trace: got no event {ANNOTATION!r}, wants one for each request")
    begins = [begin for begin, _ in requests]
    counts: dict[str, list[int]] = defaultdict(lambda: [0] * len(requests))
    times: dict[str, float] = defaultdict(float)
    on_device: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        kind, begin, duration = event.get("cat"), float(event["ts"]), float(event.get("dur", 0.0))
        if kind in ("cuda_runtime", "cuda_driver"):
            index = bisect.bisect_right(begins, begin) - 1
            if index >= 0 and begin <= requests[index][1]:
                name = plain_name(event["name"])
                counts[name][index] += 1
                times[name] += duration
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            on_device[kind].append((begin, begin + duration))
    kernels = on_device["kernel"]
    rows = [ApiCalls(name, tuple(counts[name]), times[name]) for name in counts]
    return RequestProfile(
        requests=len(requests),
        api=tuple(sorted(rows, key=lambda row: (-row.total_us, row.name))),
        kernels=len(kernels) / len(requests),
        copies=len(on_device["gpu_memcpy"]) / len(requests),
        fills=len(on_device["gpu_memset"]) / len(requests),
        kernel_us=sum(end - begin for begin, end in kernels) / len(requests),
        busy_us=length(merged(kernels)) / len(requests),
    )


def steady_state_problems(profile: RequestProfile) -> list[str]:
    """Return what keeps a runner from a steady state, in sentences.

    In a steady state it takes no memory from the driver and gives none back, never waits for the device in a CUDA
    call, and launches as much in one request as in another.
    """
    problems = []
    for kind, names in (("allocates or frees", ALLOCATIONS), ("waits for the device", SYNCHRONISATIONS)):
        for row in profile.api:
            if row.name in names:
                requests = [index for index, calls in enumerate(row.by_request) if calls]
                problems.append(
                    f"{row.name} {kind}: got {sum(row.by_request)} calls in {len(requests)} of {profile.requests} "
                    f"requests (first in request {requests[0] + 1}), wants none."
                )
    launches = profile.calls_by_request(LAUNCHES)
    if min(launches) != max(launches):
        problems.append(f"Launches vary: got {min(launches)} to {max(launches)} a request, wants the same in each.")
    return problems
