"""Findings on streams: nothing runs on those that were made, priorities, and kernels that leave no room for others."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ...records.intervals import common, length, merged
from ..finding import Finding, Mark
from ..trace import Request, Trace, Work
from .causes import Stretch, busy, by_stream, causes, kernels, times

#: Blocks that an SM holds at most, and registers are given out in.
_BLOCKS, _REGISTERS = 32, 256
_SIDE = "side = torch.cuda.Stream()  # once, not in forward\n"
_CONTEXT = _SIDE + (
    "side.wait_stream(torch.cuda.current_stream())\n"
    "with torch.cuda.stream(side):  # a small s: the context\n"
    "    answer = head(x)\n"
    "torch.cuda.current_stream().wait_stream(side)"
)


def find_unused_streams(trace: Trace) -> list[Finding]:
    """Find streams that were made and run nothing, while everything runs on another one."""
    watched = trace.watched
    noticed = [one for one in watched.noticed if one.kind == "default-stream"] if watched is not None else []
    evidence, lines = [one.evidence for one in noticed], [line for one in noticed for line in one.lines]
    if watched is not None and not any(one.graph for request in trace.requests for one in request.work):
        unused = [one for one in watched.streams if not one.operators]
        streams = {(one.device, one.stream) for request in trace.requests for one in request.work}
        if unused and len(streams) == 1:
            count = len(kernels(trace.shown))
            evidence.append(
                f"{times(len(unused), 'stream')} made and never current for a kernel; all {count} kernels of a "
                f"request run on stream {next(iter(streams))[1]}"
            )
    if not evidence:
        return []
    return [
        Finding(
            "default-stream",
            "A stream was made, and the work does not run on it: kernels go to the stream that is current when they "
            "are launched.",
            tuple(evidence),
            "Launch the work within the context of the stream, and let each stream wait for what it reads.",
            _CONTEXT,
            lines=tuple(lines),
        )
    ]


def find_priorities(trace: Trace) -> list[Finding]:
    """Find side streams that compute beside the trunk and are not lower in priority."""
    watched = trace.watched
    if watched is None:
        return []
    known = {(one.device, one.number): one.priority for one in watched.streams if one.number is not None}
    found = []
    for request in [trace.shown]:
        streams = {key: work for key, work in by_stream(kernels(request)).items() if key in known}
        for key, work in list(streams.items())[1:]:
            trunk = next(iter(streams))
            if key[0] == trunk[0] and known[key] <= known[trunk] and not any(one.graph for one in work):
                found.append(
                    f"stream {key[1]} (priority {known[key]}, {times(len(work), 'kernel')}) beside stream {trunk[1]} "
                    f"(priority {known[trunk]}, {times(len(streams[trunk]), 'kernel')}); lower is sooner"
                )
    if not found:
        return []
    return [
        Finding(
            "priority",
            "The side stream is not lower in priority than the trunk: its kernels take room that the trunk waits for.",
            tuple(found),
            "0 is the lowest priority and the default stream's, so give the trunk a stream of a higher one.",
            "trunk = torch.cuda.Stream(priority=-1)\nwith torch.cuda.stream(trunk):\n    y = block(x)",
        )
    ]


def find_full_device(trace: Trace) -> list[Finding]:
    """Find side kernels that were launched, and began only once kernels of the trunk that fill all SMs were done."""

    def stretches(request: Request) -> Iterator[Stretch]:
        streams = list(by_stream(kernels(request)).items())
        if len(streams) < 2:
            return
        (device, _), trunk = streams[0]
        trunk_busy = busy(trunk)
        trunk = sorted(trunk, key=lambda one: one.start_us)
        starts = [one.start_us for one in trunk]
        for (its_device, stream), work in streams[1:]:
            before = 0.0
            for one in sorted(work, key=lambda one: one.start_us):
                ready = max(before, one.call.end_us if one.call is not None else one.start_us)
                before = one.end_us
                if its_device != device or one.graph or one.start_us - ready < 1.0:
                    continue
                alone = one.us - length(common(trunk_busy, [(one.start_us, one.end_us)]))
                last = trunk[bisect_right(starts, one.start_us) - 1] if starts[0] <= one.start_us else None
                if last is None or alone < 0.5 * one.us or one.start_us - last.end_us > 5.0 or last.start_us < ready:
                    continue
                if _waits_for(request, stream, last) or not fills(last, trace.devices):
                    continue
                said = f"{last.name[:60]} with {prod(last.grid or ()):,} blocks, before {one.name[:60]}"
                yield Stretch("full", alone, Mark(one.start_us, one.end_us, stream), said, None)

    return [
        Finding(
            "full-device",
            "Kernels of the trunk fill all SMs, so that those of the side stream begin when they end.",
            (f"{times(cause.times, 'kernel')} a request, such as: {cause.evidence[0]}",),
            "No stream helps where there is no room: make the side work smaller (one launch a head), run it beside "
            "smaller kernels, or skip it by exits.",
            'runner = make_runner(network, images, exits="overlapped")  # a head is one small kernel',
            cause.cost_us,
            cause.lines,
            cause.marks,
        )
        for cause in causes(trace, stretches).values()
    ]


def _waits_for(request: Request, stream: int, last: Work) -> bool:
    """Tell whether a stream was made to wait after this kernel was launched: then it waits for it, room or not."""
    launched = last.call.start_us if last.call is not None else last.start_us
    return any(one.stream == stream and one.start_us >= launched for one in request.waits)


def fills(kernel: Work, devices: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a kernel has as many blocks as all SMs of its device hold at once."""
    device = next((one for one in devices if one.get("id", 0) == kernel.device), None)
    if device is None or kernel.grid is None or kernel.block is None:
        return False
    threads = max(32, -(-prod(kernel.block) // 32) * 32)
    resident = min(_BLOCKS, int(device["maxThreadsPerMultiprocessor"]) // threads)
    if kernel.registers:
        per_block = -(-kernel.registers * 32 // _REGISTERS) * _REGISTERS * (threads // 32)
        resident = min(resident, int(device["regsPerMultiprocessor"]) // per_block)
    if kernel.shared_bytes:
        resident = min(resident, int(device["sharedMemPerMultiprocessor"]) // kernel.shared_bytes)
    return prod(kernel.grid) >= max(1, resident) * int(device["numSms"])


def find_gates(trace: Trace) -> list[Finding]:
    """Find work on a side stream that the trunk waits for before it has launched anything to run beside it."""

    def stretches(request: Request) -> Iterator[Stretch]:
        streams = list(by_stream(kernels(request)).items())
        if len(streams) < 2 or any(one.graph for one in request.work):
            return
        (device, trunk_stream), trunk = streams[0]
        launched = sorted(one.call.start_us for one in trunk if one.call is not None)
        trunk_busy = busy(trunk)
        for (its_device, stream), work in streams[1:]:
            side = sorted((one for one in work if one.call is not None), key=lambda one: one.start_us)
            for wait in request.waits:
                if its_device != device or wait.stream != trunk_stream or not launched:
                    continue
                own = [one for one in side if one.call is not None and one.call.start_us < wait.start_us]
                # the trunk's last launch before the wait, and all that the side stream was given since
                before = bisect_right(launched, wait.start_us)
                if before == 0 or before == len(launched):
                    continue
                group = [one for one in own if one.call is not None and one.call.start_us > launched[before - 1]]
                ran = merged((one.start_us, one.end_us) for one in group)
                alone = length(ran) - length(common(trunk_busy, ran))
                if group and alone > 0.5 * length(ran):
                    mark = Mark(group[0].start_us, group[-1].end_us, stream)
                    said = f"{times(len(group), 'kernel')} on stream {stream}, {length(ran):.0f} us, {alone:.0f} alone"
                    yield Stretch("gate", alone, mark, said, group[0].call.line if group[0].call else None)

    return [
        Finding(
            "gate-waits",
            "The next block waits for a head: the head is on the critical path, and nothing runs beside it.",
            (f"{times(cause.times, 'time')} a request: {'; '.join(cause.evidence[:2])}",),
            "Let the head decide about the block after the next one, so that the next one runs beside it.",
            'runner = make_runner(network, images, exits="gated")  # gates the segment after the next',
            cause.cost_us,
            cause.lines,
            cause.marks,
        )
        for cause in causes(trace, stretches).values()
    ]
