"""Times of a trunk's segments, and the taps at which a network stops, chosen by them."""

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from .capture import Graph

_ROUNDS = 5
#: The device stands still for so many cycles a launch, some 15 us, while the host launches: it is to find all there.
_CYCLES_A_LAUNCH = 30_000


def measure_segments(graphs: Sequence[Graph], refill: Callable[[], object], stream: torch.cuda.Stream) -> list[float]:
    """Measure in microseconds what each graph of a trunk, which ends at a tap, takes on ``stream``.

    They are launched in their order, and from the beginning each time: a segment may overwrite what it has been handed
    by the one before, and would read indices there that are none. ``refill`` writes the input before each round.
    """
    rounds = [[torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)] for _ in range(_ROUNDS + 1)]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES_A_LAUNCH * len(rounds) * len(graphs))
        for events in rounds:
            refill()
            for graph, event in zip(graphs, events, strict=False):
                event.record(stream)
                graph.launch(stream)
            events[-1].record(stream)
    stream.synchronize()
    times = [[start.elapsed_time(end) * 1e3 for start, end in pairwise(events)] for events in rounds[1:]]
    return [statistics.median(of_graph) for of_graph in zip(*times, strict=True)]


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
