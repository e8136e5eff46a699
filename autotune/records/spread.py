"""Median and percentiles of what was measured repeatedly."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Median and percentiles of one quantity, in its unit: microseconds of a time, a share of a ratio."""

    median: float
    p20: float
    p80: float


def spread(values: Sequence[float]) -> Spread:
    """Return median, 20th and 80th percentile of at least one value."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile of at least two values; below a hundred it is little less than their maximum."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]
