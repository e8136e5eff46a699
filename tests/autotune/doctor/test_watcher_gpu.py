"""The doctor's watcher on a GPU: each planted mistake is noticed, and the same program put right gives nothing."""

import logging

import pytest
import torch
from auxhead.autotune.doctor.watching.operators import noting_captures
from support.gpu_work import warm_stream
from support.watched_requests import current, faults, marked_line, used, watched
from torch import nn
from torch._inductor.cudagraph_trees import get_manager
from torchvision.models import resnet18

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu
SIZE = 1 << 20


def line(mark):
    return marked_line(__file__, mark)


@pytest.fixture
def side():
    return warm_stream()


# 1. Races.


def test_a_copy_that_the_host_waits_for_is_an_order(side):
    host = torch.zeros(SIZE)

    def request():
        a = host.to("cuda")
        with torch.cuda.stream(side):
            b = a.sum().cpu()
        a.add_(b.item())

    assert faults(watched(request)) == []


def test_copies_of_pinned_memory_with_an_event_are_fine(side):
    host = torch.zeros(SIZE).pin_memory()
    copied = torch.cuda.Event()

    def request():
        with torch.cuda.stream(side):
            x = host.to("cuda", non_blocking=True)
            copied.record()
        current().wait_event(copied)
        x.record_stream(current())
        return x * 2

    assert faults(watched(request, 3)) == []


# 2. Freed in use.


def test_a_tensor_freed_while_another_stream_uses_it(side):
    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")
        side.wait_stream(current())
        with torch.cuda.stream(side):
            r = a * 2  # uses a
        del a  # frees a
        b = torch.full((SIZE,), 3.0, device="cuda")
        current().wait_stream(side)
        return b, r

    (race,) = watched(request).races
    assert race.freed and race.lines == (line("uses a"), line("frees a"))
    assert race.second == f"freed, of the default stream, {line('frees a')}"


# 3. What runs on a stream.


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


def test_a_graph_captured_within_a_request_runs_later(side):
    x, z = torch.zeros(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")

    def request():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x @ x
        graph.replay()
        x.copy_(z)

    assert faults(watched(request)) == []


# 4. Whole programs, and the watcher itself.


def test_a_step_of_training(side):
    net, host = resnet18(num_classes=10).cuda(), torch.randn(4, 3, 64, 64)
    optimizer = torch.optim.AdamW(net.parameters())

    def request():
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(net(host.cuda()), torch.zeros(4, dtype=torch.long, device="cuda"))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert faults(watched(request)) == []


def test_a_stream_that_torch_compile_keeps_is_not_of_the_program():
    double, x = torch.compile(lambda x: 2 * x, mode="reduce-overhead"), torch.zeros(8, device="cuda")
    with torch.no_grad():
        for _ in range(4):  # compiles, warms up, captures, replays
            double(x)
    kept = get_manager(0, create_if_none_exists=False).stream
    assert kept.cuda_stream not in {use.handle for use in watched(lambda: x + 1).streams}


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


# 5. Graphs.


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
