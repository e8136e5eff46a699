"""Times of segments, by a clock that moves only while a graph runs; forks and stops, by them or as asked for."""

from contextlib import nullcontext
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from auxhead.model import EarlyExitNetwork, OverlappedRunner, PolledRunner
from auxhead.model.auto.pass_times import done_of
from auxhead.model.runners.overlapped import fork_choices, forks_by_rule
from auxhead.model.runners.polled import stops_by_rule
from auxhead.model.runners.segment_times import choose_stops, measure_segments
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compiler_process import printed
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


def mean_us(segments: list[float], stops: tuple[int, ...], stop_us: float, done: list[float], *, ahead: bool) -> float:
    """What a batch takes in the mean, segment by segment: it is still open with what the last stop before it left.

    ``ahead`` of that, the segments up to the next stop are under way: they keep the device busy, but no answer.
    """
    us, left, still_open = segments[0], 1.0, 1.0
    for tap, after in enumerate(segments[1:]):
        if tap in stops:
            us += left * stop_us
            before, still_open = still_open, 1.0 - done[tap]
            left = (before + still_open) / 2 if ahead else still_open
        us += left * after
    return us


@settings(max_examples=200)
@given(
    st.lists(st.floats(0.0, 100.0), min_size=2, max_size=7).flatmap(
        lambda segments: st.tuples(
            st.just(segments), st.lists(st.floats(0.0, 1.0), min_size=len(segments) - 1, max_size=len(segments) - 1)
        )
    ),
    st.sampled_from([0.0, 5.0, 20.0]),
    st.sampled_from([0.0, 10.0, 40.0]),
    st.booleans(),
)
def test_where_it_is_known_who_leaves_stops_are_the_best_of_all_choices(
    given_: tuple[list[float], list[float]], stop_us: float, least_us: float, ahead: bool
) -> None:
    segments, done = given_[0], sorted(given_[1])
    taps = range(len(done))
    choices = [
        choice
        for count in range(len(done) + 1)
        for choice in combinations(taps, count)
        if all(sum(segments[start + 1 : end + 1]) >= least_us for start, end in pairwise((*choice, len(segments) - 1)))
    ]
    found = tuple(choose_stops(segments, least_us, stop_us, done, ahead=ahead))
    assert found in choices
    best = min(mean_us(segments, choice, stop_us, done, ahead=ahead) for choice in choices)
    assert mean_us(segments, found, stop_us, done, ahead=ahead) <= best + 1e-6


def test_who_asks_while_the_next_graph_runs_ends_that_one_soon_after() -> None:
    assert choose_stops([40.0] * 5, 20.0, 10.0, [1.0] * 4) == [0]
    assert stops_by_rule([40.0] * 5, [1.0] * 4) == [0, 1]
    assert stops_by_rule([40.0, 40.0], [1.0]) == [0], "the answer is there, though the last graph is under way"
    assert stops_by_rule([40.0, 40.0], [0.3]) == []


@pytest.mark.parametrize("done", [[0.5], [0.5, 0.5, 1.5], [0.1, float("nan"), 0.2]])
def test_shares_of_batches_are_one_for_each_tap(done: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auxhead.model.runners.graph_runner.check_capturable", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"done: got .*, wants 3 shares, 0 to 1, one for each tap"):
        PolledRunner(EarlyExitNetwork(SmallNet(), plain_heads(), 1.0).eval(), torch.randn(1, 3, 8, 8), done=done)


def test_a_batch_is_done_where_its_last_sample_leaves() -> None:
    exits = torch.tensor([[0, 2], [0, 0], [1, 3]])
    assert done_of(exits, 3) == [1.5 / 4, 1.5 / 4, 2.5 / 4]
    assert done_of(torch.full((1, 8), 3), 3) == [0.25] * 3, "of one batch little is known"


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


def test_launches_of_a_runner_are_compiled_side_by_side(tmp_path: Path) -> None:
    """And by what is set where they are asked for, as whether a launch records where its programs run."""
    assert printed("compile_side_by_side.py", tmp_path) == {"made": 4, "distinct": 8, "noted": 4}
