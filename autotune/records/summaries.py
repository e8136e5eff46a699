"""Parts of records that several kinds share: spreads and summaries of timings, and values as they are kept."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Microseconds of one variant, [captures][rounds].
Timings = Sequence[Sequence[float]]


class Percentiles(NamedTuple):
    """Median and percentiles of one quantity, in its unit: microseconds of a time, a share of a ratio."""

    median: float
    p20: float
    p80: float


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return median, 20th and 80th percentile of at least one value."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Percentiles(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile of at least two values; below a hundred it is little less than their maximum."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


#: Digits of microseconds and shares; the smallest shares are of the order of 1e-4.
_DIGITS = 6


def summary(by_capture: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Summarise timed calls: over all of them, and the median of each capture that has any."""
    overall = percentiles([value for values in by_capture for value in values])
    return {**overall._asdict(), "captures": [percentiles(values).median for values in by_capture if values]}


def with_samples(timings: Timings) -> dict[str, Any]:
    """Summarise timed rounds as other records do, and keep them all."""
    return {**summary(timings), "samples": timings}


def rounded(timings: Timings, digits: int) -> list[list[float]]:
    """Return timings with so many digits after the point."""
    return [[round(us, digits) for us in rounds] for rounds in timings]


def as_json(value: Any) -> Any:
    """Return a value as records hold it: objects of named tuples and mappings, lists of sequences, floats rounded."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: as_json(one) for name, one in value.items()}
    return [as_json(one) for one in value] if isinstance(value, (list, tuple)) else value
