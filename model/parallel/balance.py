"""Deals consecutive segments to parts or stages, by their times, so that the slowest is as fast as can be."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

_WARM_UPS, _RUNS = 2, 5


def balanced(loads: Sequence[float], stages: int) -> list[int]:
    """Return the first segment of each stage, so that the largest sum of loads of one is as small as can be."""

    @cache
    def best(first: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return sum(loads[first:]), (first,)
        found = []
        for end in range(first + 1, len(loads) - stages + 2):
            later, starts = best(end, stages - 1)
            found.append((max(sum(loads[first:end]), later), (first, *starts)))
        return min(found)

    return [*best(0, stages)[1]]


def median_ms(run: Callable[[], object]) -> float:
    """Measure what a run takes that the host waits for, in milliseconds."""
    times = []
    for _ in range(_WARM_UPS + _RUNS):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[_WARM_UPS:])
