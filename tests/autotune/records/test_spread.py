"""Medians and percentiles of timed calls."""

from auxhead.autotune.records.spread import spread


def test_spread():
    assert spread([5.0]) == (5.0, 5.0, 5.0)
    assert spread(range(100, -1, -1)) == (50, 20, 80)
