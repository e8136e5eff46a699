"""Times of a trunk's segments, and the taps at which a network stops, chosen by them."""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..taps import listening
from .capture import capture_graphs

_ROUNDS = 5
_LAUNCHES = 4  # timed in one go


def measure_segments(
    module: nn.Module, taps: Sequence[str], x: Tensor, stream: torch.cuda.Stream, pool: torch.cuda.MemPool
) -> list[float]:
    """Measure in microseconds what each segment of a trunk, which ends at a tap, takes for ``x`` on ``stream``."""

    def forward(cut: Callable[[], None]) -> None:
        held: list[Tensor] = []

        def on_tap(_index: int, features: Tensor) -> None:
            held.append(features)
            cut()

        with listening(module, taps, on_tap):
            module(x)

    graphs, _ = capture_graphs(forward, module, x.device, stream, pool)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, of_graph in zip(graphs, times, strict=True):
            graph.launch(stream)
            start.record(stream)
            for _ in range(_LAUNCHES):
                graph.launch(stream)
            end.record(stream)
            end.synchronize()
            of_graph.append(start.elapsed_time(end) * 1e3 / _LAUNCHES)
    return [statistics.median(of_graph) for of_graph in times]


def choose_stops(segment_us: Sequence[float], least_us: float) -> list[int]:
    """Choose the taps at which to stop, by index: as many as can be, with ``least_us`` of the trunk after each."""
    stops: list[int] = []
    left = 0.0
    for tap_index, us in reversed(list(enumerate(segment_us[1:]))):
        left += us
        if left >= least_us:
            stops.insert(0, tap_index)
            left = 0.0
    return stops
