"""The choice among runners that were measured taking turns: the simplest of those that nothing beats beyond noise."""

import math
import statistics
from collections.abc import Mapping, Sequence

#: How often chance alone may make one of two equal runners look faster.
_LEVEL = 0.005
#: Part of a time below which a difference is none: less than that is lost when the same graph is captured again.
LEAST_DIFFERENCE = 0.01


def choose(us: Mapping[str, Sequence[float]], plain: str) -> str:
    """Choose a runner.

    Args:
        us: by name, simplest first, the time of each pass; the n-th passes of all were measured beside each other.
        plain: nothing slower than this one is chosen.

    Returns:
        str: the first that is slower, beyond noise, neither than the plain one nor than the fastest.
    """
    allowed = [name for name, times in us.items() if not slower(times, us[plain])]
    fastest = min(allowed, key=lambda name: statistics.median(us[name]))
    return next(name for name in allowed if not slower(us[name], us[fastest]))


def slower(us: Sequence[float], other_us: Sequence[float]) -> bool:
    """Whether a runner is slower than another beyond noise: pass by pass more often than by chance, and by enough."""
    differences = [one - other for one, other in zip(us, other_us, strict=True)]
    least = LEAST_DIFFERENCE * statistics.median(other_us)
    return statistics.median(differences) >= least and _beyond_chance(sum(d > 0 for d in differences), len(differences))


def _beyond_chance(wins: int, passes: int) -> bool:
    """Whether as many heads of as many tosses of a coin come up rarely enough."""
    return sum(math.comb(passes, count) for count in range(wins, passes + 1)) <= _LEVEL * 2**passes
