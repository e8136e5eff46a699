"""The polled runner launches no more graphs than a request needs, and one."""

from types import SimpleNamespace

import pytest
import torch
from auxhead.model import PolledRunner
from auxhead.model.runners.polled import PolledBatch


class FakeGraph:
    """Says at once how many samples stay open after the stop before it."""

    def __init__(self, number: int, segments: "FakeBatch") -> None:
        self.number, self.segments = number, segments

    def launch(self, _stream: object) -> None:
        self.segments.launched.append(self.number)
        if self.number > 0:
            still_open = 0 if self.number > self.segments.exit_stop else 4
            self.segments.open_samples[self.number - 1] = (self.segments.on_device << 32) + still_open


class FakeBatch(PolledBatch):
    def __init__(self, stops: int) -> None:
        self.open_samples, self.request, self.on_device = [0] * stops, 0, 0
        self.graphs = [FakeGraph(i, self) for i in range(stops + 1)]
        self.launched: list[int] = []
        self.buffers = SimpleNamespace(packed_answer=torch.zeros(1))

    def fill(self, _x: torch.Tensor, _stream: object) -> None:
        self.on_device += 1

    def empty_answer(self) -> tuple[torch.Tensor, str]:
        return torch.empty(1), "answer"


@pytest.mark.parametrize("stops", [0, 1, 2, 6])
def test_a_polled_request_launches_at_most_one_graph_more_than_it_needs(
    monkeypatch: pytest.MonkeyPatch, stops: int
) -> None:
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    waited: list[object] = []
    stream = SimpleNamespace(wait_event=lambda event: None, query=lambda: True)
    caller = SimpleNamespace(wait_event=waited.append)
    runner = PolledRunner.__new__(PolledRunner)
    runner._stream = stream  # type: ignore[assignment]
    runner._event = SimpleNamespace(record=lambda stream: None)  # type: ignore[assignment]
    captured = FakeBatch(stops)
    for exit_stop in (0, 3, 6, 5, 1, 6, 2, 4):  # the numbers that a request leaves are not the next one's
        captured.exit_stop, captured.launched, waited[:] = exit_stop, [], []
        assert runner._answer_polling(captured, torch.empty(4), caller) == "answer"  # type: ignore[arg-type]
        assert captured.launched == list(range(min(exit_stop + 2, stops + 1)))
        assert len(waited) == (exit_stop >= stops), "the caller's stream waits for the classifier alone"
