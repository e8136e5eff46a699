"""Comparison of two measured variants: the ratio of their times with an interval; paired, hierarchical, deterministic.

Two captures of the same work differ by up to 3 %, and rounds of one capture by outliers of any size. So a variant is
timed in several fresh captures; in every round each capture of each variant is timed once. What is compared is the mean
over a variant's captures of their medians over the rounds, in logarithms, after what all captures have in common in a
round (a clock that drifts) is taken off. A bootstrap draws rounds, the same for both variants, and of each variant
captures, and so tells the standard error. Few captures make that error itself uncertain, which Student's t allows for.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .summaries import Timings

#: Confidence of an interval.
CONFIDENCE = 0.99
#: Confidence of the intervals that decide between configurations. Captures scatter with longer tails than a bootstrap
#: of a few knows: at 99 % about 1.1 % of what is compared with itself looked different (2,500 configurations, H200).
DECIDING = 0.995
#: Differences below this are ties, however sure they are: nobody would notice, and another day turns them round.
NEGLIGIBLE = 0.005
#: Bootstrap draws: the standard error is then good to about 3 %.
_DRAWS = 500

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Paired:
    """One variant and the baseline that was timed in the same rounds."""

    own: Timings
    baseline: Timings
    run: str
    """Variants of one run were timed in the same rounds."""

    @property
    def over_baseline(self) -> float:
        """The variant's time over the baseline's, without an interval; any number of captures."""
        return math.exp(self._log_ratio)

    @cached_property
    def _logs(self) -> Floats:
        """Both variants' logarithms, [A + B, R], without what they have in common."""
        own, baseline = (_logarithms("timings", timings, captures=1) for timings in (self.own, self.baseline))
        return _without_drift(own, baseline)

    @cached_property
    def _log_ratio(self) -> float:
        return _log_ratio(self._logs, len(self.own))

    @cached_property
    def _standard_error(self) -> float:
        """Of ``_log_ratio``; kept, since a bootstrap takes a third of a millisecond."""
        return 0.0 if self.own == self.baseline else _standard_error(self._logs, len(self.own))


class Difference(NamedTuple):
    """The ratio of two variants' times, with its interval."""

    median_ratio: float
    """The first one's time over the second one's."""
    low: float
    """The interval's lower end; the ratio lies in it at the confidence asked for."""
    high: float

    @property
    def is_tie(self) -> bool:
        """True if neither is faster, as far as one can tell or would care."""
        return self.low <= 1.0 <= self.high or _is_negligible(math.log(self.median_ratio))


def compare(a: Timings, b: Timings, *, confidence: float = CONFIDENCE) -> Difference:
    """Compare two variants that were timed in the same rounds.

    Args:
        a: microseconds, [captures][rounds], at least two captures.
        b: the same; captures of a and b are not related, round r of a and b is.
        confidence: of the interval.

    Raises:
        ValueError: fewer than two captures, no rounds, different numbers of them, or times that are not positive.
    """
    logs = _comparable(a, b)
    return _interval(_log_ratio(logs, len(a)), _standard_error(logs, len(a)), len(logs) - 2, confidence)


def tie(a: Timings, b: Timings, *, confidence: float = CONFIDENCE) -> bool:
    """Return ``compare(a, b).is_tie``, without a bootstrap where the difference is negligible, however sure."""
    return _is_negligible(_log_ratio(_comparable(a, b), len(a))) or compare(a, b, confidence=confidence).is_tie


def compare_runs(a: Paired, b: Paired, *, confidence: float = DECIDING) -> Difference:
    """Compare two variants, by what each takes over the baseline if they were not timed in the same run."""
    if a.run == b.run:
        return compare(a.own, b.own, confidence=confidence)
    freedom = sum(len(one.own) + len(one.baseline) - 2 for one in (a, b))
    error = math.hypot(a._standard_error, b._standard_error)
    return _interval(a._log_ratio - b._log_ratio, error, freedom, confidence)


def runs_tie(a: Paired, b: Paired, *, confidence: float = DECIDING) -> bool:
    """Return ``compare_runs(a, b).is_tie``, without a bootstrap where the difference is negligible, however sure."""
    if a.run == b.run:
        return tie(a.own, b.own, confidence=confidence)
    return _is_negligible(a._log_ratio - b._log_ratio) or compare_runs(a, b, confidence=confidence).is_tie


def typical(timings: Timings) -> float:
    """Return the geometric mean over captures of their medians, microseconds."""
    return math.exp(float(_medians(_logarithms("timings", timings, captures=1)).mean()))


def _is_negligible(log_ratio: float) -> bool:
    return abs(log_ratio) < NEGLIGIBLE


def _comparable(a: Timings, b: Timings) -> Floats:
    """Return the logarithms of two variants' times, [A + B, R], without what they have in common."""
    first, second = _logarithms("a", a), _logarithms("b", b)
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"b: got {second.shape[1]} rounds, wants {first.shape[1]}, those of a")
    return _without_drift(first, second)


def _logarithms(name: str, timings: Timings, captures: int = 2) -> Floats:
    try:
        values = np.asarray(timings, dtype=np.float64)
    except ValueError:
        raise ValueError(f"{name}: got captures of different numbers of rounds, wants as many of each") from None
    if values.ndim != 2 or values.shape[0] < captures or values.shape[1] < 1:
        raise ValueError(f"{name}: got timings of shape {values.shape}, wants [captures >= {captures}][rounds >= 1]")
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"{name}: got times that are not positive, wants microseconds")
    return np.log(values)


def _log_ratio(logs: Floats, count: int) -> float:
    """Return the logarithm of the ratio of two variants' times: of the first ``count`` captures, and of the others."""
    return float(_of_captures(_medians(logs), count))


def _standard_error(logs: Floats, count: int) -> float:
    """Return the standard error of ``_log_ratio``, by the bootstrap.

    Raises:
        ValueError: a single capture of one of the variants.
    """
    other, rounds = len(logs) - count, logs.shape[1]
    least = min(count, other)
    if least < 2:
        raise ValueError(f"timings: got {count} captures and {other} of the baseline, wants two or more of each")
    times_drawn, drawn_captures = _draws(count, other, rounds)
    medians = _medians_of_drawn(logs, times_drawn)  # [A + B, draws]
    resampled = _of_captures(np.take_along_axis(medians, drawn_captures, axis=0), count)
    # a bootstrap of n varies by (n - 1) / n of what it should
    return float(resampled.std(ddof=1)) * math.sqrt(least / (least - 1))


def _without_drift(first: Floats, second: Floats) -> Floats:
    """Return both variants' captures, [A + B, R], less what all have in common in a round."""
    both = np.concatenate([first, second])
    return both - _medians(both.T)


def _medians(values: Floats) -> Floats:
    """Return the medians over the last axis; sorted, since numpy's median takes up to five times as long for few."""
    ordered = np.sort(values, axis=-1)
    middle = values.shape[-1] // 2
    return ordered[..., middle] if values.shape[-1] % 2 else (ordered[..., middle - 1] + ordered[..., middle]) / 2


def _medians_of_drawn(values: Floats, times_drawn: Counts) -> Floats:
    """Return the median of each capture, of [M, R], over the rounds of each draw: [M, draws].

    Counted, not sorted: each draw's rounds are some of the same R, whose order is known. This takes a tenth of that.
    """
    rounds = values.shape[1]
    order = values.argsort(axis=1)
    ordered = np.take_along_axis(values, order, axis=1)
    up_to = times_drawn[order.T]  # [R, M, draws]: how often the round of each rank was drawn, and soon all up to it
    for rank in range(1, rounds):
        up_to[rank] += up_to[rank - 1]

    def drawn(place: int) -> Floats:
        """Return the value at a place in the order of what was drawn: of the first rank that reaches it."""
        return np.take_along_axis(ordered, (up_to <= place).sum(axis=0, dtype=up_to.dtype), axis=1)

    middle = rounds // 2
    return drawn(middle) if rounds % 2 else (drawn(middle - 1) + drawn(middle)) / 2


@cache
def _draws(count: int, other: int, rounds: int) -> tuple[Counts, npt.NDArray[np.int64]]:
    """Return what is drawn: how often each round, [R, draws], and captures of the variants, [A + B, draws]."""
    drawn = np.random.default_rng(0)
    of_first = drawn.integers(count, size=(count, _DRAWS))
    of_second = count + drawn.integers(other, size=(other, _DRAWS))
    drawn_rounds = drawn.integers(rounds, size=(_DRAWS, rounds))
    times_drawn = np.stack([np.bincount(one, minlength=rounds) for one in drawn_rounds], axis=1)
    # small numbers are added up sooner
    return times_drawn.astype(np.min_scalar_type(rounds)), np.concatenate([of_first, of_second])


def _of_captures(medians: Floats, count: int) -> Floats:
    difference: Floats = medians[:count].mean(axis=0) - medians[count:].mean(axis=0)
    return difference


def _interval(estimate: float, error: float, freedom: int, confidence: float) -> Difference:
    half = student_quantile(freedom, 0.5 + confidence / 2) * error
    return Difference(math.exp(estimate), math.exp(estimate - half), math.exp(estimate + half))


@cache
def student_quantile(freedom: int, probability: float) -> float:
    """Return the quantile of Student's t, 0.5 <= probability < 1, good to 1 in 1,000 up to 0.99999."""
    angle = np.linspace(0.0, math.pi / 2, 100_001)  # t = sqrt(freedom) * tan(angle)
    density = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * probability - 1, below / below[-1], angle)))
