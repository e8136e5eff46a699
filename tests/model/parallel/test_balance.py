"""Segments dealt to stages by their times."""

from itertools import combinations

import pytest
from auxhead.model.parallel.segments import balanced


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_slowest_stage_is_as_fast_as_it_can_be(stages):
    loads = [3.0, 1.0, 4.0, 1.0, 5.0]

    def slowest(starts):
        return max(sum(loads[start:end]) for start, end in zip(starts, [*starts[1:], 5], strict=True))

    starts = balanced(loads, stages)
    assert len(starts) == stages and starts[0] == 0 and starts == sorted(set(starts))
    assert slowest(starts) == min(slowest([0, *cuts]) for cuts in combinations(range(1, 5), stages - 1))
