"""The doctor's watcher on a GPU: what neither a fake one nor the programs that are watched as a whole tell."""

import logging

import pytest
import torch
from auxhead.autotune.doctor.watching.operators import noting_captures
from support.gpu_work import warm_stream
from support.watched_requests import current, faults, used, watched
from torch import nn

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu
SIZE = 1 << 20


@pytest.fixture
def side():
    return warm_stream()


def test_a_copy_that_the_host_waits_for_is_an_order(side):
    host = torch.zeros(SIZE)

    def request():
        a = host.to("cuda")
        with torch.cuda.stream(side):
            b = a.sum().cpu()
        a.add_(b.item())

    assert faults(watched(request)) == []


@triton.jit
def _double(x, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(x + offsets, 2 * tl.load(x + offsets, mask=mask), mask=mask)


def test_a_block_in_which_triton_launches(side):
    x = torch.zeros(SIZE, device="cuda")

    def request():
        with torch.cuda.stream(side):
            _double[(SIZE // 1024,)](x, SIZE, BLOCK=1024)
        torch.zeros(4, device="cuda")

    seen = watched(request)
    assert faults(seen) == []
    assert used(seen) == [(0, 2), (side.cuda_stream, 2)]


def test_nothing_is_printed_or_left_behind(side, capfd, caplog):
    own = {kind: dict(vars(kind)) for kind in (torch.cuda.Stream, torch.cuda.Event, torch.cuda.StreamContext)}
    a = torch.zeros(SIZE, device="cuda")

    def request():
        with torch.cuda.stream(side):
            a.add_(1)
        a.add_(2)

    with caplog.at_level(logging.INFO):
        seen = watched(request)
    assert len(seen.races) == 2
    request()
    assert len(seen.races) == 2 and capfd.readouterr() == ("", "")
    assert not [one for one in caplog.records if one.name.startswith("torch.cuda")]
    assert {kind: dict(vars(kind)) for kind in own} == own


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("what", ["input", "answer"])
@torch.no_grad()
def test_the_memory_of_a_graph(side, what, waits):
    x, net = torch.ones(64, 64, device="cuda"), nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        net(x)
    current().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with noting_captures(), torch.cuda.graph(graph):
        y = net(x)

    def request():
        if what == "input":
            with torch.cuda.stream(side):
                x.fill_(2)
            if waits:
                current().wait_stream(side)
        graph.replay()
        if waits or what == "input":
            side.wait_stream(current())
        if what == "answer":
            with torch.cuda.stream(side):
                y[32:].sum()
            current().wait_stream(side)

    assert faults(watched(request)) == ([] if waits else ["race"])


@torch.no_grad()
def test_a_graph_is_the_same_whether_or_not_its_capture_is_noted():
    net = torch.compile(lambda x: x.sin().mul(2).add(1).relu())  # one kernel, where eagerly it is four
    x = torch.randn(8, 64, device="cuda")
    wanted = net(x)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in range(2)]
    with torch.cuda.graph(graphs[0]):
        net(x)
    with noting_captures(), torch.cuda.graph(graphs[1]):
        y = net(x)
    graphs[1].replay()
    assert torch.equal(y, wanted)
    runtime = pytest.importorskip("cuda.bindings.runtime")
    counts = [runtime.cudaGraphGetNodes(runtime.cudaGraph_t(graph.raw_cuda_graph()))[2] for graph in graphs]
    assert counts == [1, 1]
