"""The doctor's watcher on a GPU: threads, graphs, views of one tensor, and backwards; each fault, and put right."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from auxhead.autotune.doctor.watching.operators import noting_captures
from auxhead.autotune.doctor.watching.watcher import Watcher
from support.gpu_work import warm_stream
from torch import nn

pytestmark = pytest.mark.gpu
SIZE = 1 << 20


@pytest.fixture
def side():
    return warm_stream()


def main():
    return torch.cuda.current_stream()


def faults(request):
    """Kinds of what is noticed in two requests, races among them; waits of the host aside."""
    with Watcher() as watching:
        for _ in range(2):
            request()
    torch.cuda.synchronize()
    seen = watching.watched(2)
    return sorted({one.kind for one in seen.noticed} - {"host-wait"} | {"race" for _ in seen.races})


@pytest.mark.parametrize("enters", [False, True])
@torch.no_grad()
def test_a_thread_of_a_pool(side, enters):
    x = torch.ones(SIZE, device="cuda")

    def launch():
        with torch.no_grad(), torch.cuda.stream(side if enters else None):
            return x * 2

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()

        def request():
            side.wait_stream(main())
            with torch.cuda.stream(side):
                submitted = pool.submit(launch)
            x.sum()
            submitted.result().record_stream(main())
            main().wait_stream(side)

        assert faults(request) == ([] if enters else ["default-stream"])


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("what", ["input", "answer"])
@torch.no_grad()
def test_the_memory_of_a_graph(side, what, waits):
    x, net = torch.ones(64, 64, device="cuda"), nn.Sequential(nn.Linear(64, 64), nn.ReLU()).cuda()
    side.wait_stream(main())
    with torch.cuda.stream(side):
        net(x)
    main().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with noting_captures(), torch.cuda.graph(graph):
        y = net(x)

    def request():
        if what == "input":
            with torch.cuda.stream(side):
                x.fill_(2)
            if waits:
                main().wait_stream(side)
        graph.replay()
        if waits or what == "input":
            side.wait_stream(main())
        if what == "answer":
            with torch.cuda.stream(side):
                y[32:].sum()
            main().wait_stream(side)

    assert faults(request) == ([] if waits else ["race"])


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


@pytest.mark.parametrize("apart", [False, True])
@torch.no_grad()
def test_slices_of_one_tensor(side, apart):
    canvas = torch.zeros(64, SIZE // 64, device="cuda")

    def request():
        side.wait_stream(main())
        with torch.cuda.stream(side):
            canvas[:33].add_(1)
        canvas[33 if apart else 32 :].add_(1)
        main().wait_stream(side)

    assert faults(request) == ([] if apart else ["race"])


@pytest.mark.parametrize("forward", ["outside", "inside"])
def test_a_backward_in_a_block(side, forward):
    net, x = nn.Linear(64, 1).cuda(), torch.ones(64, 64, device="cuda")

    def request():
        side.wait_stream(main())
        if forward == "outside":
            loss = net(x).sum()
            side.wait_stream(main())
        with torch.cuda.stream(side):
            if forward == "inside":
                loss = net(x).sum()
            loss.backward()
        main().wait_stream(side)
        net.zero_grad()

    assert faults(request) == (["default-stream"] if forward == "outside" else [])
