"""Chooses among runners that were measured by turns: the plain one, unless others beat it beyond noise."""

import math
import statistics
from collections.abc import Mapping, Sequence

#: Chance alone may make one of two equal runners look faster this often.
_LEVEL = 0.005
#: Part of a time below which a difference is none: less than that is lost when the same graph is captured again.
LEAST_DIFFERENCE = 0.01


def choose(us: Mapping[str, Sequence[float]], plain: str) -> str:
    """Choose the plain runner, unless others are faster beyond noise; then the first as fast as the fastest of them.

    ``us`` holds by name, simplest first, the time of each pass; the n-th passes of all were measured beside each other.
    """
    faster = [name for name, times in us.items() if slower(us[plain], times)]
    if not faster:
        return plain
    fastest = min(faster, key=lambda name: statistics.median(us[name]))
    return next(name for name in faster if not slower(us[name], us[fastest]))


def slower(us: Sequence[float], other_us: Sequence[float]) -> bool:
    """Return whether a runner is slower than another in more passes than by chance, and by enough."""
    differences = [one - other for one, other in zip(us, other_us, strict=True)]
    least = LEAST_DIFFERENCE * statistics.median(other_us)
    return statistics.median(differences) >= least and _beyond_chance(sum(d > 0 for d in differences), len(differences))


def _beyond_chance(wins: int, passes: int) -> bool:
    """Return whether a fair coin comes up heads so often, in so many tosses, rarely enough."""
    return sum(math.comb(passes, count) for count in range(wins, passes + 1)) <= _LEVEL * 2**passes
