"""Comparison of two measured variants: the ratio of their times with an interval; paired, hierarchical, deterministic.

Two captures of the same work differ by up to 3 %, and rounds of one capture by outliers of any size. So a variant is
timed in several fresh captures; in every round each capture of each variant is timed once. What is compared is the mean
over a variant's captures of their medians over the rounds, in logarithms, after what all captures have in common in a
round (a clock that drifts) is taken off. A bootstrap draws rounds, the same for both variants, and of each variant
captures, and so tells the standard error. Few captures make that error itself uncertain, which Student's t allows for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

#: Microseconds of one variant, [captures][rounds].
Timings = Sequence[Sequence[float]]

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


@dataclass(frozen=True)
class Paired:
    """One variant and the baseline that was timed in the same rounds."""

    own: Timings
    baseline: Timings
    run: str
    """Variants of one run were timed in the same rounds."""

    @cached_property
    def over_baseline(self) -> float:
        """The variant's time over the baseline's, without an interval; any number of captures."""
        own, baseline = (_logarithms("timings", timings, captures=1) for timings in (self.own, self.baseline))
        drift = np.median(np.concatenate([own, baseline]), axis=0)
        return math.exp(float(np.median(own - drift, axis=1).mean() - np.median(baseline - drift, axis=1).mean()))

    @cached_property
    def _estimate(self) -> tuple[float, float]:
        """Logarithm of the same ratio, and its standard error; kept, since a bootstrap takes a millisecond."""
        if self.own == self.baseline:  # it is the baseline itself
            return 0.0, 0.0
        return _difference(_logarithms("own", self.own), _logarithms("baseline", self.baseline))


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
        return self.low <= 1.0 <= self.high or abs(math.log(self.median_ratio)) < NEGLIGIBLE


def compare(a: Timings, b: Timings, *, confidence: float = CONFIDENCE) -> Difference:
    """Compare two variants that were timed in the same rounds.

    Args:
        a: microseconds, [captures][rounds], at least two captures.
        b: the same; captures of a and b are not related, round r of a and b is.
        confidence: of the interval.

    Raises:
        ValueError: fewer than two captures, no rounds, different numbers of them, or times that are not positive.
    """
    first, second = _logarithms("a", a), _logarithms("b", b)
    if first.shape[1] != second.shape[1]:
        raise ValueError(f"b: got {second.shape[1]} rounds, wants {first.shape[1]}, those of a")
    estimate, error = _difference(first, second)
    return _interval(estimate, error, len(first) + len(second) - 2, confidence)


def compare_runs(a: Paired, b: Paired, *, confidence: float = DECIDING) -> Difference:
    """Compare two variants, by what each takes over the baseline if they were not timed in the same run."""
    if a.run == b.run:
        return compare(a.own, b.own, confidence=confidence)
    (of_a, error_a), (of_b, error_b) = a._estimate, b._estimate
    freedom = sum(len(one.own) + len(one.baseline) - 2 for one in (a, b))
    return _interval(of_a - of_b, math.hypot(error_a, error_b), freedom, confidence)


def typical(timings: Timings) -> float:
    """Return the geometric mean over captures of their medians, microseconds."""
    return math.exp(float(np.median(_logarithms("timings", timings, captures=1), axis=1).mean()))


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


def _difference(first: Floats, second: Floats) -> tuple[float, float]:
    """Return the estimate and the standard error of a log ratio, from logarithms [captures, rounds]."""
    (count, rounds), other = first.shape, len(second)
    both = np.concatenate([first, second])
    both = both - np.median(both, axis=0)  # [A + B, R]
    drawn_rounds, drawn_captures = _draws(count, other, rounds)
    medians = _medians_of_last(both[:, drawn_rounds])  # [A + B, draws]
    resampled = _of_captures(np.take_along_axis(medians, drawn_captures, axis=0), count)
    # a bootstrap of n varies by (n - 1) / n of what it should
    least = min(count, other)
    error = float(resampled.std(ddof=1)) * math.sqrt(least / (least - 1))
    return float(_of_captures(np.median(both, axis=1), count)), error


def _medians_of_last(values: Floats) -> Floats:
    """Return the medians over the last axis; sorted, since numpy's median takes up to five times as long for few."""
    ordered = np.sort(values, axis=-1)
    middle = values.shape[-1] // 2
    return ordered[..., middle] if values.shape[-1] % 2 else (ordered[..., middle - 1] + ordered[..., middle]) / 2


@cache
def _draws(count: int, other: int, rounds: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return what is drawn: rounds [draws, R], and captures of the first and of the second variant [A + B, draws]."""
    drawn = np.random.default_rng(0)
    of_first = drawn.integers(count, size=(count, _DRAWS))
    of_second = count + drawn.integers(other, size=(other, _DRAWS))
    return drawn.integers(rounds, size=(_DRAWS, rounds)), np.concatenate([of_first, of_second])


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
