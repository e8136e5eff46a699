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


def starts_of(name: str, ends: str | Sequence[str], taps: Sequence[str], parts: int, kind: str) -> list[int] | None:
    """Return the first segment of each part as an argument says it; None if they are to be balanced.

    Args:
        name: of the argument, for errors.
        ends: its value, "auto" or the taps at which one part ends and the next begins.
        taps: of the network.
        parts: how many there are.
        kind: what has a part each, such as "ranks", for errors.

    Raises:
        ValueError: neither of these, or more parts than segments.
    """
    if parts > len(taps) + 1:
        raise ValueError(f"{kind}: got {parts}, wants at most {len(taps) + 1}: the network has {len(taps)} taps")
    if isinstance(ends, str):
        if ends != "auto":
            raise ValueError(f"{name}: got {ends!r}, wants 'auto' or a list of taps")
        return None
    given = [*ends]
    if len(given) != parts - 1 or given != [tap for tap in taps if tap in given]:
        raise ValueError(f"{name}: got {given}, wants {parts - 1} of {[*taps]}, in this order, for {parts} {kind}")
    return [0, *(taps.index(tap) + 1 for tap in given)]


def median_ms(run: Callable[[], object]) -> float:
    """Measure what a run takes that the host waits for, in milliseconds."""
    times = []
    for _ in range(_WARM_UPS + _RUNS):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[_WARM_UPS:])
