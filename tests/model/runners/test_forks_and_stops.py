"""Times of segments, by a clock that moves only while a graph runs; forks and stops, by them or as asked for."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from auxhead.model import EarlyExitNetwork, OverlappedRunner
from auxhead.model.runners.overlapped import fork_choices, forks_by_rule
from auxhead.model.runners.segment_times import choose_stops, measure_segments
from support.example_models import SmallNet, plain_heads


def test_heads_fork_where_enough_of_the_trunk_is_left() -> None:
    blocks = [42.0, 16, 18, 16, 17, 16, 22, 20, 3]  # like ResNet-18 with a head after every block
    assert forks_by_rule(blocks) == [5]
    assert forks_by_rule([50.0, 30, 30, 40]) == [2], "the last of three stages has a fourth to hide behind"
    assert forks_by_rule([100.0, 1]) == [], "a head at the end runs with the classifier"


@pytest.mark.parametrize("last", range(9))
def test_what_the_rule_chooses_is_one_of_the_choices(last: int) -> None:
    choices = fork_choices(last)
    assert forks_by_rule([10.0] * (last + 1) + [40.0, 1.0]) in choices
    assert choices == sorted(choices, key=len) and len({tuple(choice) for choice in choices}) == len(choices)
    assert choices[0] == [last] and choices[-1] == list(range(last + 1))


@pytest.mark.parametrize(
    ("forks", "kind", "message"),
    [
        (("block0", "block9"), ValueError, "got 'block9', wants taps of the network: block0, block1, block2"),
        ((0,), ValueError, "got 0, wants taps"),
        ("block0", TypeError, "got 'block0', wants a sequence of taps, or None"),
        (1, TypeError, "got 1, wants a sequence"),
    ],
    ids=str,
)
def test_forks_are_taps(forks: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"forks: {message}"):
        OverlappedRunner(EarlyExitNetwork(SmallNet(), plain_heads(), 1.0).eval(), torch.randn(1, 3, 8, 8), forks=forks)


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


def test_segments_run_in_their_order_and_their_times_are_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event's times are milliseconds, and it takes 4 us itself; two rounds in six that took longer are no matter."""
    clock = {"ms": 0.0, "runs": 0}
    launched: list[str] = []

    class Graph:
        def __init__(self, name: str, us: float) -> None:
            self.name, self.us = name, us

        def launch(self, _stream: object) -> None:
            launched.append(self.name)
            clock["ms"] += self.us / 1000 * (50 if clock["runs"] <= 4 else 1)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, _stream: object) -> None:
            self.ms = clock["ms"]
            clock["ms"] += 0.004

        def elapsed_time(self, end: "Event") -> float:
            return end.ms - self.ms

    def refill() -> None:
        launched.append("refilled")
        clock["runs"] += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _cycles: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    graphs: Any = [Graph("first", 80.0), Graph("second", 30.0)]
    stream: Any = SimpleNamespace(synchronize=lambda: None)
    assert measure_segments(graphs, refill, stream) == pytest.approx([82.0, 32.0])
    assert launched == ["refilled", "first", "second"] * 12
