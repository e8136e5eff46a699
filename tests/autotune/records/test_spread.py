"""Medians and percentiles of timed calls."""

from auxhead.autotune.records.summaries import p99, spread


def test_spread():
    assert spread([5.0]) == (5.0, 5.0, 5.0)
    assert spread(range(100, -1, -1)) == (50, 20, 80)


def test_99_of_100_lie_below_the_99th_percentile():
    """By linear interpolation between the ordered values, as NumPy's."""
    assert p99(range(101)) == 99.0 and p99([*range(100, -1, -1)]) == 99.0
    assert abs(p99([1.0, 2.0]) - 1.99) < 1e-12
    assert abs(p99([0.0] * 9 + [100.0]) - 91.0) < 1e-9, "below a hundred little less than their maximum"
