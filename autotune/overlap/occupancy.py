"""Occupancy of the multiprocessors (SMs) by head launches, in tiers that must not be mixed; ``TIERS`` describes each.

Only residency is measured. Shares are from 0 to 1.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ...kernels.launch.residency import Residency
from ..measuring.cuda_calls import HEAD_KERNEL
from ..records.intervals import Interval, length, merged

#: Tiers of occupancy: how each comes about, and what it cannot show.
TIERS = {
    "theoretical": "warps that programs of one launch could fill of an SM, by registers, shared memory and warps of "
    "the compiled kernel (cuOccupancyMaxActiveBlocksPerMultiprocessor): a bound, whatever else is there",
    "estimate": "what torch.profiler prints of a launch, computed from its grid and block: nothing is measured, a "
    "launch of few programs rounds to 0, and more than 48 KB of shared memory is 0",
    "residency": "warps of head programs that were there, over time, of all that the SMs hold: measured in the kernel, "
    "by SM, start and end of each program; there, not necessarily issuing",
}


class TheoreticalOccupancy(NamedTuple):
    """Upper bound of one launch's occupancy, by its registers, shared memory and warps."""

    registers: int
    """Registers of a thread."""
    spills: int
    """Bytes that a thread spills."""
    shared_bytes: int
    """Shared memory of a program."""
    num_warps: int
    """Warps of a program."""
    programs_per_sm: int
    share: float
    """Share of an SM's warps that these programs have."""


def theoretical_occupancy(compiled: Any, device: torch.device) -> TheoreticalOccupancy:
    """Ask the driver how many programs of a kernel, compiled and launched on the current device, fit on an SM.

    Raises:
        RuntimeError: the driver does not say.
    """
    from cuda.bindings import driver  # there is none where torch has no CUDA

    num_warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    status, fit = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        driver.CUfunction(compiled.function), 32 * num_warps, shared
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: {status.name}")
    share = fit * num_warps / max_warps(device)
    return TheoreticalOccupancy(compiled.n_regs, compiled.n_spills, shared, num_warps, int(fit), share)


def max_warps(device: torch.device) -> int:
    """Return how many warps an SM of a CUDA device holds."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.max_threads_per_multi_processor // properties.warp_size)


class ProfilerEstimate(NamedTuple):
    """The occupancy that torch.profiler prints of one launch."""

    percent: float
    known_zero: bool
    """True: the profiler says 0, which no launch that runs is; it has few programs, or more shared memory than the
    profiler reckons with."""


def profiler_estimates(trace: Mapping[str, Any]) -> list[list[ProfilerEstimate]]:
    """Return the profiler's estimates of the head launches in a Chrome trace: [replays][launches], in order of time."""
    by_replay: dict[Any, list[ProfilerEstimate]] = {}
    for event in sorted(trace["traceEvents"], key=lambda event: float(event.get("ts", 0.0))):
        if event.get("cat") == "kernel" and event["name"].startswith(HEAD_KERNEL):
            percent = float(event["args"]["est. achieved occupancy %"])
            by_replay.setdefault(event["args"]["correlation"], []).append(ProfilerEstimate(percent, percent == 0.0))
    return list(by_replay.values())


class MeasuredResidency(NamedTuple):
    """The share of the SMs that head programs took, over a span of time."""

    warps_share: float
    """Warps of head programs, over time, of all warps that the SMs hold: occupancy as measured in the kernel."""
    sm_share: float
    """Time during which SMs held any head program, of the time of all SMs."""
    sms: int
    """SMs that had any."""
    us: float
    """Time from the first program's start to the last one's end."""


def measured_residency(
    launches: Iterable[Residency], sm_count: int, sm_warps: int, span_us: float
) -> MeasuredResidency:
    """Return the share of the SMs that the launches of one replay took, by their own recording.

    Args:
        launches: with turns on the CPU.
        sm_count: SMs of the device.
        sm_warps: warps that an SM holds.
        span_us: time that shares are of, microseconds: that of the trunk, for instance.

    Raises:
        ValueError: nothing was recorded, a program did not run, or its row makes no sense.
    """
    lanes: dict[int, list[Interval]] = {}
    warps_us = 0.0
    for launch in launches:
        check_turns(launch, sm_count)
        for sm, start, end in launch.turns.tolist():
            lanes.setdefault(sm, []).append((start / 1e3, end / 1e3))
        warps_us += launch.num_warps * (launch.turns[:, 2] - launch.turns[:, 1]).sum().item() / 1e3
    if not lanes:
        raise ValueError("launches: got none, wants what head launches recorded")
    occupied = [merged(lane) for lane in lanes.values()]
    began, ended = min(lane[0][0] for lane in occupied), max(lane[-1][1] for lane in occupied)
    of_all = sm_count * span_us
    return MeasuredResidency(
        warps_us / (of_all * sm_warps), sum(map(length, occupied)) / of_all, len(lanes), ended - began
    )


def check_turns(launch: Residency, sm_count: int) -> None:
    """Raise ``ValueError`` if a program of a launch did not record where it ran, or no such place or time."""
    sm, start, end = launch.turns.unbind(1)
    silent = int((sm < 0).sum())
    if silent:
        raise ValueError(f"turns: {silent} of {len(sm)} were not recorded, wants the launch to have run")
    if int(sm.max()) >= sm_count or bool((end < start).any()) or bool((start <= 0).any()):
        raise ValueError(f"turns: got an SM of {sm_count} that there is not, or an end before its start")
