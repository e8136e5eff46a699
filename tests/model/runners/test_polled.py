"""The polled runner launches no more graphs than a request needs, and one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from auxhead.model import PolledRunner
from auxhead.model.runners.polled import PolledBatch

MASK = 2**64 - 1


class FakeGraph:
    """Says at once how many samples stay open after the stop before it."""

    def __init__(self, number: int, segments: "FakeBatch") -> None:
        self.number, self.segments = number, segments

    def launch(self, _stream: object) -> None:
        self.segments.launched.append(self.number)
        if self.number > 0:
            still_open = 0 if self.number > self.segments.exit_stop else 4
            number = (self.segments.on_device << 32) + still_open & MASK  # an int64 overflows
            self.segments.open_samples[self.number - 1] = np.uint64(number).astype(np.int64)


class FakeBatch(PolledBatch):
    def __init__(self, stops: int) -> None:
        self.open_samples, self.request, self.on_device = np.zeros(stops, np.int64), 0, 0
        self.graphs = [FakeGraph(i, self) for i in range(stops + 1)]
        self.launched: list[int] = []
        self.buffers = SimpleNamespace(packed_answer=torch.zeros(1))

    def fill(self, _x: torch.Tensor, _stream: object) -> None:
        self.on_device += 1

    def empty_answer(self) -> tuple[torch.Tensor, str]:
        return torch.empty(1), "answer"


@pytest.fixture
def runner() -> PolledRunner:
    runner = PolledRunner.__new__(PolledRunner)
    runner._stream = SimpleNamespace(wait_event=lambda event: None, query=lambda: True)  # type: ignore[assignment]
    runner._event = SimpleNamespace(record=lambda stream: None)  # type: ignore[assignment]
    return runner


@pytest.mark.parametrize("before", [0, 2**31 - 3, 2**32 - 3, 2**33 - 1])
@pytest.mark.parametrize("stops", [1, 2, 6])
def test_a_polled_request_launches_at_most_one_graph_more_than_it_needs(
    runner: PolledRunner, stops: int, before: int
) -> None:
    waited: list[object] = []
    caller = SimpleNamespace(wait_event=waited.append)
    captured = FakeBatch(stops)
    captured.on_device, captured.buffers.requests = before, torch.tensor([before])
    captured.count_requests()
    for exit_stop in (0, 3, 6, 5, 1, 6, 2, 4):  # the numbers that a request leaves are not the next one's
        captured.exit_stop, captured.launched, waited[:] = exit_stop, [], []
        assert runner._answer_polling(captured, torch.empty(4), caller) == "answer"  # type: ignore[arg-type]
        assert captured.launched == list(range(min(exit_stop + 2, stops + 1)))
        assert len(waited) == (exit_stop >= stops), "the caller's stream waits for the classifier alone"


def test_a_batch_that_nobody_stops_runs_on_the_callers_stream_behind_what_another_has_left(
    runner: PolledRunner,
) -> None:
    captured, done = FakeBatch(0), []
    runner._captures = SimpleNamespace(unneeded="what another has left")  # type: ignore[assignment]
    caller = SimpleNamespace(wait_event=done.append)
    captured.graphs[0].launch = done.append  # type: ignore[method-assign]
    captured.fill = lambda _x, stream: done.append(stream)  # type: ignore[method-assign]
    captured.copied_answer = lambda: "answer"  # type: ignore[assignment,method-assign,return-value]
    assert runner._answer_polling(captured, torch.empty(4), caller) == "answer"  # type: ignore[arg-type]
    assert done == ["what another has left", caller, caller]


@pytest.mark.parametrize("boundary", [2**31, 2**32])
def test_a_number_that_was_left_is_not_taken_for_one_of_a_later_round(boundary: int) -> None:
    """Wherever a stop was reached last, for as long as its number is not looked at."""
    captured = FakeBatch(3)
    captured.open_samples[:] = [(boundary - 5) % 2**31 << 32, 0, -(1 << 63)]
    captured.request = boundary - 1
    captured.next_request()
    for number in captured.open_samples:
        ahead = ((int(number) >> 32) - captured.request) % 2**32
        assert ahead >= 2**31, "a request before the next boundary has that number"


def test_the_host_waits_as_long_as_the_device_works(runner: PolledRunner) -> None:
    captured, busy = FakeBatch(1), [True, True, False]
    captured.request = 7

    def query() -> bool:
        """The number comes as the device is asked whether it is done."""
        if not busy[0]:
            captured.open_samples[0] = (7 << 32) + 3
        return not busy.pop(0)

    runner._stream.query = query  # type: ignore[method-assign]
    assert runner._poll(captured, 0) == 3 and not busy


def test_a_launch_that_says_nothing_is_not_waited_for(runner: PolledRunner) -> None:
    captured = FakeBatch(1)
    captured.request = 7
    with pytest.raises(RuntimeError, match="heads of stop 0"):
        runner._poll(captured, 0)
