"""Times of the passes that a plan is chosen by, by a clock that moves only while a runner answers."""

from functools import partial
from itertools import groupby

import pytest
import torch
from auxhead.model.auto.planner import measure
from torch import Tensor


class Clock:
    """Time that passes only while a runner answers."""

    us = 0.0

    def perf_counter(self) -> float:
        return self.us / 1e6

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def record(self) -> None:
        self.us = self.clock.us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return (end.us - self.us) / 1e3


@pytest.mark.parametrize(("batches", "passes"), [(16, 8), (3, 14), (1, 40)])
def test_a_pass_takes_all_batches_and_its_time_is_their_mean(monkeypatch, batches: int, passes: int) -> None:
    """The median of a runner that answers most batches early would tell nothing of the others."""
    clock = Clock()
    monkeypatch.setattr("auxhead.model.auto.planner.time", clock)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: clock)
    us = {"early": [10.0 if index else 110.0 for index in range(batches)], "plain": [50.0] * batches}
    calls: list[tuple[str, int]] = []

    def answer(name: str, x: Tensor) -> None:
        calls.append((name, int(x)))
        clock.us += us[name][int(x)]

    times = measure({name: partial(answer, name) for name in us}, [torch.tensor(index) for index in range(batches)])
    for name in us:
        wanted = pytest.approx([sum(us[name]) / batches] * passes)
        assert times[name].host == wanted and times[name].device == wanted
    assert set(calls) == {(name, index) for name in us for index in range(batches)}
    turns = [(name, len(list(of_one))) for name, of_one in groupby(name for name, _ in calls)]
    one = 1 + 2 * batches
    assert turns[:3] == [("early", one), ("plain", 2 * one), ("early", 2 * one)], "who was last is first the next time"
