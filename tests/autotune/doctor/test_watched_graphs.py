"""What the doctor's watcher knows of the memory of graphs; on a fake GPU."""

import pytest
import torch
from auxhead.autotune.doctor.watching.operators import memory_of_graph, noting_captures
from auxhead.autotune.doctor.watching.watcher import Watcher
from support import fake_cuda_streams as fake


class Doubled:
    """A graph that doubles its static input."""

    def __init__(self):
        self.x, self.graph = torch.zeros(4), torch.cuda.CUDAGraph()
        self.graph.capture_begin()
        self.y = self.x * 2
        self.graph.capture_end()


@pytest.fixture
def doubled(main):
    with noting_captures():
        return Doubled()


def races(watching):
    return [(race.first.partition(" on ")[0], race.second.partition(" on ")[0]) for race in watching.races]


def test_an_input_that_another_stream_writes_without_order_is_a_race(doubled, side):
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            doubled.x.fill_(3)
        doubled.graph.replay()
    watched = watching.watched(requests=1)
    assert races(watched) == [("writes: aten::fill_", "reads: a graph's replay")]
    assert all(line.startswith("test_watched_graphs.py:") for line in watched.races[0].lines)
    assert len(watched.races[0].lines) == 2


def test_an_answer_that_another_stream_reads_without_order_is_a_race(doubled, side):
    with Watcher() as watching:
        doubled.graph.replay()
        with torch.cuda.StreamContext(side):
            doubled.y[1:].sum()
    assert races(watching.watched(requests=1)) == [("writes: a graph's replay", "reads: aten::sum")]


def test_an_answer_that_is_overwritten_while_it_is_read_is_a_race(doubled, side):
    with Watcher() as watching:
        doubled.graph.replay()
        side.wait_stream(fake.current())
        with torch.cuda.StreamContext(side):
            doubled.y.sum()
        doubled.graph.replay()
    assert races(watching.watched(requests=1)) == [("reads: aten::sum", "writes: a graph's replay")]


def test_accesses_in_order_are_none(doubled, main, side):
    with Watcher() as watching:
        for _ in range(2):
            with torch.cuda.StreamContext(side):
                doubled.x.fill_(3)
            main.wait_stream(side)
            doubled.graph.replay()
            side.wait_stream(main)
            with torch.cuda.StreamContext(side):
                doubled.y.sum()
            main.wait_stream(side)
    assert watching.watched(requests=2).races == ()


def test_of_a_graph_that_was_captured_before_nothing_is_known(main, side):
    before = Doubled()
    assert memory_of_graph(before.graph) is None
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            before.x.fill_(3)
        before.graph.replay()
    assert watching.watched(requests=1).races == ()


def test_what_is_compiled_is_captured_compiled_and_stays_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.CUDAGraph)
    runs = []

    def backend(module, _inputs):
        return lambda *args: runs.append("compiled") or module(*args)

    compiled, graph, x = torch.compile(lambda x: x * 2, backend=backend), torch.cuda.CUDAGraph(), torch.ones(4)
    compiled(x)
    with noting_captures():
        graph.capture_begin()
        compiled(x)
        graph.capture_end()
    compiled(x)
    assert len(runs) == 3


def test_the_methods_are_afterwards_as_they_were_and_a_failed_capture_leaves_no_mode(main):
    before = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(KeyError), noting_captures():
        graph.capture_begin()
        try:
            raise KeyError
        finally:
            graph.capture_end()  # as torch.cuda.graph does
    assert (torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end) == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
