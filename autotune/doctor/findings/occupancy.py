"""Kernels that fill the device, so that what is ready beside them has to wait."""

import bisect
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...measuring.cuda_calls import EVENT_RECORDS
from ...records.intervals import common, length
from ..finding import Finding, Mark
from ..trace import Request, Trace, Work
from .device import Stream, intervals, kernels, stream_of, trunk_stream
from .per_request import first_few, median_us, short_name, shown_request, us

#: Of a launch until its kernel runs on an idle device, so that a kernel that begins later was held up.
_START_US = 5.0
#: Kernels that fill the device run for at least this share of the time that a kernel is held up.
_FULL_SHARE = 0.8
#: What runs beside nothing is a finding from this many microseconds, this share of the side's time.
_LEAST_US, _LEAST_SHARE = 10.0, 0.5
#: Resident blocks that an SM has at most, and what one takes of its shared memory for itself.
_MOST_BLOCKS, _RESERVED_BYTES = 32, 1024
_REGISTERS_OF_A_WARP = 256
"""Registers are given to warps in multiples of it."""


def resident_blocks(work: Work, device: Mapping[str, Any]) -> int | None:
    """Return how many blocks of a kernel an SM holds at once; None where the trace does not say."""
    try:
        threads = device["maxThreadsPerMultiprocessor"]
        registers = device["regsPerMultiprocessor"]
        shared = device["sharedMemPerMultiprocessor"]
    except KeyError:
        return None
    if work.block is None or work.registers is None:
        return None
    x, y, z = work.block
    warps = -(-x * y * z // 32)
    if warps <= 0:
        return None
    of_warp = -(-max(work.registers, 1) * 32 // _REGISTERS_OF_A_WARP) * _REGISTERS_OF_A_WARP
    by_shared = shared // ((work.shared_bytes or 0) + _RESERVED_BYTES)
    return max(1, int(min(_MOST_BLOCKS, threads // (32 * warps), registers // (of_warp * warps), by_shared)))


def fills(work: Work, trace: Trace) -> bool:
    """Tell whether a kernel has enough blocks for all SMs to be full of them."""
    device = next((one for one in trace.devices if one.get("id", 0) == work.device), None)
    if device is None or work.grid is None or not isinstance(device.get("numSms"), int):
        return False
    blocks = resident_blocks(work, device)
    x, y, z = work.grid
    return blocks is not None and x * y * z >= device["numSms"] * blocks


class HeldUp(NamedTuple):
    """A kernel that was ready and ran only when the device had room."""

    work: Work
    ready_us: float
    by: tuple[Work, ...]


def held_up(trace: Trace, request: Request, trunk: Stream) -> list[HeldUp]:
    """Return the kernels beside the trunk that were ready, and waited for trunk kernels that fill the device.

    Ready is what is launched, when its stream has done what came before, and when all is done that other streams were
    given before the event was recorded that its stream waits for. Kernels of graphs have an order that no trace tells.
    """
    all_kernels = [work for work in kernels(request) if work.call is not None and not work.graph]
    full = [work for work in all_kernels if stream_of(work) == trunk and fills(work, trace)]
    filled = intervals(full)
    if not filled or not request.waits:
        return []
    records = sorted(call.start_us for call in request.calls if call.name in EVENT_RECORDS)
    found = []
    latest: dict[Stream, float] = {}
    for work in sorted(all_kernels, key=lambda one: one.start_us):
        stream, call = stream_of(work), work.call
        if stream != trunk and call is not None:
            ready = max(call.end_us, latest.get(stream, 0.0), _waited_until(work, request, records))
            late = [(ready, work.start_us)] if work.start_us - ready > _START_US else []
            if late and length(common(late, filled)) >= _FULL_SHARE * (work.start_us - ready):
                by = tuple(one for one in full if one.start_us < work.start_us and one.end_us > ready)
                found.append(HeldUp(work, ready, by))
        latest[stream] = max(latest.get(stream, 0.0), work.end_us)
    return found


def _waited_until(work: Work, request: Request, records: list[float]) -> float:
    """Return when all is done that a kernel's stream was made to wait for before it was launched."""
    assert work.call is not None
    waits = [w.start_us for w in request.waits if w.stream == work.stream and w.start_us < work.call.start_us]
    if not waits:
        return 0.0
    index = bisect.bisect_right(records, waits[-1]) - 1
    recorded = records[index] if index >= 0 else waits[-1]
    return max(
        (
            one.end_us
            for one in request.work
            if one.call is not None and one.call.start_us < recorded and stream_of(one) != stream_of(work)
        ),
        default=0.0,
    )


def find_full_device(trace: Trace) -> list[Finding]:
    """Find side kernels that run beside nothing, for the trunk's kernels fill the device while they are ready."""
    trunk = trunk_stream(trace)
    if trunk is None:
        return []
    held = {id(request): held_up(trace, request, trunk) for request in trace.requests}

    def alone_us(request: Request) -> float:
        side = intervals([one.work for one in held[id(request)]])
        beside = common(side, intervals([work for work in kernels(request) if stream_of(work) == trunk]))
        return length(side) - length(beside)

    def side_us(request: Request) -> float:
        return length(intervals([work for work in kernels(request) if stream_of(work) != trunk]))

    cost = median_us(trace, alone_us)
    if cost < _LEAST_US or cost < _LEAST_SHARE * median_us(trace, side_us):
        return []
    request = shown_request(trace)
    shown = held[id(request)] or next(found for found in held.values() if found)
    evidence = [
        f"{short_name(one.work)} on stream {one.work.stream} was ready, waited {us(one.work.start_us - one.ready_us)} "
        f"and ran for {us(one.work.us)}" + (f", behind {short_name(one.by[-1])} {_size(one.by[-1])}" if one.by else "")
        for one in shown
    ]
    return [
        Finding(
            kind="full-device",
            what="The trunk's kernels fill all SMs, so that what is ready on the side stream runs after them.",
            evidence=first_few(evidence),
            remedy="No stream makes room on a full device: make the side's work smaller (one launch a head), or run it "
            "where the trunk is small, behind later layers or at smaller batches.",
            snippet="from auxhead.model import fuse_aux_heads\n\n"
            "report = fuse_aux_heads(model)  # each head one launch of a few blocks\n"
            "print(report.replaced.keys(), report.left_alone)\n",
            cost_us=cost,
            marks=tuple(Mark(one.work.start_us, one.work.end_us, one.work.stream) for one in held[id(request)]),
        )
    ]


def _size(work: Work) -> str:
    x, y, z = work.grid or (0, 0, 0)
    a, b, c = work.block or (0, 0, 0)
    return f"({x * y * z:,} blocks of {a * b * c} threads)"
