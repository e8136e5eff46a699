"""Times of a trunk's segments, and the taps at which a network stops, chosen by them."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import torch

from ...kernels.cuda.lifetimes import empty_cache
from .capture import Graph

_ROUNDS = 5
#: The device stands still for so many cycles a launch, some 15 us, while the host launches: it is to find all there.
_CYCLES_A_LAUNCH = 30_000


def measure_segments(graphs: list[Graph], refill: Callable[[], object], stream: torch.cuda.Stream) -> list[float]:
    """Measure in microseconds what each graph of a trunk, which ends at a tap, takes on ``stream``; frees the graphs.

    They are launched in their order, and from the beginning each time: a segment may overwrite what it has been handed
    by the one before, and would read indices there that are none. ``refill`` writes the input before each time. What
    the events between graphs take themselves is measured by rounds without them, and taken off again.
    """
    rounds = [(_marks(len(graphs) + 1), _marks(2)) for _ in range(_ROUNDS + 1)]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES_A_LAUNCH * 2 * len(rounds) * len(graphs))
        for around_each, around_all in rounds:
            refill()
            for graph, event in zip(graphs, around_each, strict=False):
                event.record(stream)
                graph.launch(stream)
            around_each[-1].record(stream)
            refill()
            around_all[0].record(stream)
            for graph in graphs:
                graph.launch(stream)
            around_all[1].record(stream)
    stream.synchronize()
    of_rounds = [_between(around_each) for around_each, _ in rounds[1:]]
    times = [statistics.median(of_graph) for of_graph in zip(*of_rounds, strict=True)]
    whole = statistics.median(us for _, around_all in rounds[1:] for us in _between(around_all))
    added = (sum(times) - whole) / len(times)
    del graph  # the last one
    graphs.clear()
    empty_cache()  # of their pool: the runs before the next capture take memory, too
    return [us - added for us in times]


def _marks(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def _between(events: Sequence[torch.cuda.Event]) -> list[float]:
    return [start.elapsed_time(end) * 1e3 for start, end in pairwise(events)]


def choose_stops(
    segment_us: Sequence[float],
    least_us: float,
    stop_us: float = 0.0,
    done: Sequence[float] | None = None,
    *,
    ahead: bool = False,
) -> list[int]:
    """Choose the taps at which to stop, by index, with ``least_us`` of the trunk after each: as many as can be.

    Where it is known how many batches are ``done`` by each tap, shares from 0 to 1, it is those with which a batch
    takes least in the mean: a stop that is come to takes ``stop_us``, and of what follows those are spared that are
    done; with none where that never pays. ``ahead`` of a stop's decision what follows it is under way up to the next:
    a batch that is done has its answer, but keeps the device that long, and half of it is counted.
    """
    if done is None:
        stops: list[int] = []
        left = 0.0
        for tap_index, us in reversed(list(enumerate(segment_us[1:]))):
            left += us
            if left >= least_us:
                stops.insert(0, tap_index)
                left = 0.0
        return stops
    still_open = [*(1.0 - share for share in done), 1.0]  # the last one is at the beginning, -1

    @cache
    def best_after(before: int, stop: int) -> tuple[float, list[int]]:
        """Return the least mean time behind a stop, which has another before it, and the stops that are to follow."""
        runs = (still_open[before] + still_open[stop]) / 2 if ahead else still_open[stop]
        left = sum(segment_us[stop + 1 :])
        ways: list[tuple[float, list[int]]] = [(runs * left, [])] if stop < 0 or left >= least_us else []
        for following in range(stop + 1, len(still_open) - 1):
            us = sum(segment_us[stop + 1 : following + 1])
            if stop < 0 or us >= least_us:
                rest_us, stops = best_after(stop, following)
                ways.append((runs * (us + stop_us) + rest_us, [following, *stops]))
        return min(ways, default=(math.inf, []))

    return best_after(-1, -1)[1]
