"""Stops are chosen by the times of the segments."""

import pytest
from auxhead.model.runners.segment_times import choose_stops


@pytest.mark.parametrize(
    ("segments", "stops"),
    [
        ([40.0, 30, 30, 40], [0, 1, 2]),
        ([40.0, 13, 13, 13, 13], [0, 2]),
        ([40.0, 30, 10, 10], [0]),
        ([5.0, 5, 5], []),
    ],
)
def test_stops_are_as_many_as_leave_enough_of_the_trunk_after_each(segments: list[float], stops: list[int]) -> None:
    assert choose_stops(segments, 25.0) == stops
