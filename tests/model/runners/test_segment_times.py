"""Times of segments, by a clock that moves only while a graph runs; stops are chosen by them."""

from typing import Any

import pytest
import torch
from auxhead.model.runners import segment_times
from auxhead.model.runners.segment_times import choose_stops, measure_segments
from torch import nn


@pytest.mark.parametrize(
    ("segments", "stops"),
    [
        ([40.0, 30, 30, 40], [0, 1, 2]),
        ([40.0, 13, 13, 13, 13], [0, 2]),
        ([40.0, 30, 10, 10], [0]),
        ([5.0, 5, 5], []),
        ([40.0, 25, 25], [0, 1]),
        ([40.0, 24.5], []),
        ([40.0, 24.5, 25], [1]),
        ([40.0, 24.75, 0.25, 25.5], [0, 2]),
    ],
)
def test_stops_are_as_many_as_leave_enough_of_the_trunk_after_each(segments: list[float], stops: list[int]) -> None:
    assert choose_stops(segments, 25.0) == stops


def test_the_time_of_a_segment_is_that_of_one_launch_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event's times are milliseconds; one round in five that took longer is no matter."""
    clock = {"ms": 0.0, "launches": 0}

    class Graph:
        def __init__(self, us: float) -> None:
            self.us = us

        def launch(self, _stream: object) -> None:
            clock["launches"] += 1
            clock["ms"] += self.us / 1000 * (50 if clock["launches"] <= 10 else 1)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, _stream: object) -> None:
            self.ms = clock["ms"]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return end.ms - self.ms

    def capture_graphs(*_: Any) -> tuple[list[Graph], None]:
        return [Graph(80.0), Graph(30.0)], None

    monkeypatch.setattr(segment_times, "capture_graphs", capture_graphs)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    arguments: Any = (nn.Identity(), [], torch.zeros(1), None, None)
    assert measure_segments(*arguments) == pytest.approx([80.0, 30.0])
