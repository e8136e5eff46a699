"""Graphs of whatever is measured, on a GPU."""

import gc

import torch
from auxhead.autotune.measuring.captured import OwnGraph
from support.example_models import needs_gpu

pytestmark = needs_gpu


def test_garbage_does_not_break_a_capture() -> None:
    """A graph that only the collector can free, dropped while another one is captured."""
    x, stream = torch.ones(8, device="cuda"), torch.cuda.Stream()
    garbage = [OwnGraph(lambda: x * 2, stream)]
    garbage[0].itself = garbage[0]

    def program() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            garbage.clear()
            gc.set_threshold(1, 1, 1)
        return [x + number for number in range(9)][-1]

    thresholds = gc.get_threshold()
    try:
        graph = OwnGraph(program, stream)
    finally:
        gc.set_threshold(*thresholds)
    graph()
    assert not garbage and gc.isenabled()
    assert torch.equal(graph.answer, x + 8)
