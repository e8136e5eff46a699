"""Measures what a network's segments, cuts and links take for micro-batches of one size, on this GPU."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...kernels import decide
from ...kernels.memory_pool import MemoryPool
from ...model import EarlyExitNetwork
from ...model.auto.example_batches import batches_of
from ...model.module_head import AuxHead
from ...model.parallel.pipeline.answered import first_state
from ...model.parallel.pipeline.cut import Cut, cut, wires_like
from ...model.parallel.pipeline.placement import merging_ms
from ...model.parallel.pipeline.stage import Stage
from ...model.parallel.segments import Segment
from ...model.runners.capture import Capture, Graph, warm_up
from ...model.streams import stream_pair
from ..measuring.timers import time_rounds
from .layouts import SegmentTimes

_ROUNDS, _REPEAT = 10, 5


def measure_segments(
    network: EarlyExitNetwork, samples: Tensor, split_size: int, link_ms: Callable[[int], float]
) -> SegmentTimes:
    """Measure segments as CUDA graphs, and a stage of all of them as the engine runs it.

    Args:
        network: on a CUDA device.
        samples: a batch for it; a micro-batch is cut of it.
        split_size: samples of a micro-batch.
        link_ms: from a number of bytes to the time that they take to another GPU.

    Raises:
        BadInput: ``torch.export`` cannot trace the backbone.
        RuntimeError: a layer cannot be captured, or there is no memory.
    """
    micro_batch = batches_of(samples.detach(), split_size)[0]
    made, micro_batch = cut(network, micro_batch, micro_batch.device, "cudnn")
    segments = made.segments
    with torch.no_grad():
        stage_ms = _whole_stage_ms(made, micro_batch)
        wires = [wires_like(segment.hands, micro_batch.device) for segment in segments[:-1]]
        handing = [_cloning(each) for each in wires]
        runs = capture_segments(segments, made.heads, micro_batch)
        calls = {index: [run] for index, run in enumerate([*runs, *handing])}
        times = time_rounds(calls, micro_batch.device, rounds=_ROUNDS, repeat=_REPEAT)
    ms = [statistics.median(rounds) / 1e3 for [rounds] in times.values()]
    segment_ms = ms[: len(segments)]
    return SegmentTimes(
        split_size,
        segment_ms,
        turn_ms=max(0.0, stage_ms - sum(segment_ms)),
        handing_ms=ms[len(segments) :],
        gathering_ms=merging_ms(segments, micro_batch)[:-1],
        link_ms=[link_ms(first_state(split_size).nbytes + sum(part.nbytes for part in each)) for each in wires],
    )


def capture_segments(
    segments: Sequence[Segment], heads: Sequence[AuxHead], micro_batch: Tensor
) -> list[Callable[[], object]]:
    """Capture each segment with its head, one behind another, for micro-batches like this; returns what launches each.

    Args:
        segments: of a backbone on a CUDA device.
        heads: behind each but the last.
        micro_batch: a copy of it is what the first segment reads.
    """
    device, given = micro_batch.device, micro_batch.clone()
    held: list[object] = []  # what graphs write: a graph is launched without those that free and write it anew
    stream, memory = stream_pair(device).trunk, MemoryPool(device)
    modules = nn.ModuleList([*(segment.module for segment in segments), *heads])

    def forward(cut: Callable[[], None]) -> None:
        handed: Sequence[Tensor] = (given,)
        held.clear()
        for index, segment in enumerate(segments):
            if index:
                cut()
            read, *handed = segment.module(*handed)
            held.extend((read, handed, heads[index](read) if index < len(heads) else decide(read, 1.0, 1.0)))

    warm_up(lambda: forward(lambda: None), lambda: None, stream)
    capture = Capture(device, memory)
    with capture.capturing(stream, modules):
        forward(capture.cut)
    current = torch.cuda.current_stream(device)
    current.wait_stream(stream)

    def launching(graph: Graph) -> Callable[[], object]:
        def launch() -> object:
            graph.launch(current)
            return given, held  # which the graph reads and writes, and so live as long as this

        return launch

    return [launching(graph) for graph in capture.graphs]


def _whole_stage_ms(made: Cut, micro_batch: Tensor) -> float:
    """Measure the time of a micro-batch on a stage that has the whole network."""
    stage = Stage(
        made, 0, len(made.segments), len(micro_batch), micro_batch.device, merges=False, name="the whole network"
    )
    stage.capture(micro_batch)
    try:
        return _median_ms(lambda: stage.compute_alone([micro_batch]), [micro_batch.device])
    finally:
        stage.close()


def _cloning(tensors: Sequence[Tensor]) -> Callable[[], object]:
    return lambda: [each.clone() for each in tensors]


def copy_ms(size: int, source: torch.device, target: torch.device) -> float:
    """Measure the time in ms that some bytes take from one GPU to another."""
    from_, into = (torch.empty(size, dtype=torch.uint8, device=device) for device in (source, target))

    def copies() -> None:
        for _ in range(_REPEAT):
            into.copy_(from_, non_blocking=True)

    return _median_ms(copies, [source, target]) / _REPEAT


def _median_ms(run: Callable[[], object], devices: Sequence[torch.device]) -> float:
    times = []
    for turn in range(_ROUNDS + 2):
        began = time.perf_counter()
        run()
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        if turn >= 2:  # after those that warm up
            times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)
