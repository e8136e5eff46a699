"""Unions and common parts of intervals, compared with counting the units of time that lie in them."""

import random

from auxhead.autotune.records.intervals import common, length, merged


def units(intervals):
    return {unit for begin, end in intervals for unit in range(int(begin), int(end))}


def test_they_hold_the_units_of_time_that_theirs_do():
    draw = random.Random(0)
    for _ in range(300):
        first, second = (
            [(begin, begin + draw.randint(0, 6)) for begin in (draw.randint(0, 30) for _ in range(draw.randint(0, 6)))]
            for _ in range(2)
        )
        unions = [merged(one) for one in (first, second)]
        for one, union in zip((first, second), unions, strict=True):
            assert units(union) == units(one) and length(union) == len(units(one))
            gaps = [later[0] - earlier[1] for earlier, later in zip(union, union[1:], strict=False)]
            assert all(gap > 0 for gap in gaps), "in order, and those that touch are one"
        shared = common(*unions)
        assert units(shared) == units(first) & units(second) and all(begin < end for begin, end in shared)
        assert shared == common(*reversed(unions))
