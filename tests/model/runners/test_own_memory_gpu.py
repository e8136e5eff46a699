"""A runner owns what its graphs read and write, and touches nobody else's memory, whatever fails."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from auxhead.kernels.cuda.lifetimes import MemoryPool
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_runner
from auxhead.model.runners.capture import Capture, warm_up
from auxhead.model.runners.captures import take_streams
from support.example_models import SmallNet, Wide, needs_gpu
from support.graph_runner_cases import (
    assert_identical,
    assert_same,
    clear_batches,
    exits_at,
    images,
    made,
    network,
    untouched,
)
from support.scaling_kernel import scaled
from torch import Tensor, nn

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]

# A constructor that fails


class FailingAt(nn.Module):
    """Queues a delay in the run before the one in which it fails, so that launches are still under way then."""

    def __init__(self, run: int) -> None:
        super().__init__()
        self.left = run

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 1:
            torch.cuda._sleep(3_000_000_000)  # longer than the collector takes
        if self.left == 0:
            raise ValueError("no more")
        return x


@pytest.mark.parametrize("run", [2, 4, 6])
def test_a_constructor_that_fails_leaves_nothing_that_still_writes(way: str, run: int) -> None:
    net = network()
    make_runner(net, images(8), batch_sizes=[8], exits="overlapped").close()  # compiled
    failing = FailingAt(run).eval()
    net.backbone.block2.append(failing)
    torch.cuda.synchronize()
    gc.collect()
    with pytest.raises((ValueError, RuntimeError), match="no more"):
        made(net, way, (8,))
    gc.collect()  # frames that the error has held
    with untouched([4, *(1 << power for power in (9, 10, 11, 12, 13, 14, 16, 18))], 24):
        pass
    net.backbone.block2.pop(-1)
    x = clear_batches(net, [8])[0]
    assert_same(made(net, way, (8,))(x), net(x))


# What a graph reads and writes lives as long as it


class Splitting(nn.Module):
    taps = ("block0", "block1")

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.block0 = nn.Sequential(nn.Linear(16384, 64), nn.Tanh())
        self.block1 = nn.Sequential(nn.Linear(64, 16384), nn.Tanh(), nn.Linear(16384, 64), nn.Tanh())
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block1(self.block0(x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_workspaces_that_others_clear_stay_the_graphs_own(way: str, dtype: torch.dtype) -> None:
    """As torch.compile(mode="reduce-overhead") clears them."""
    net = EarlyExitNetwork(Splitting(), {"block0": FusedAuxHead(64, 5), "block1": FusedAuxHead(64, 5)}, 1.0)
    net = net.cuda().to(dtype).eval()
    x = torch.randn(8, 16384, device="cuda", dtype=dtype)
    for _ in range(2):  # the second one gets the streams of the first
        runner = make_runner(net, x, exits=way, batch_sizes=(8,))
        wanted = runner(x)
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        with untouched([1 << 20, 4 << 20, 8 << 20, 32 << 20, 33 << 20], copies=6):
            for _ in range(20):
                found = runner(x)
        assert_identical(found, wanted)
        runner.close()


class Masking(SmallNet):
    """Keeps a mask for the size that it was called with last."""

    kept: Tensor | None = None

    def scaled(self, x: Tensor) -> Tensor:
        if self.kept is None or len(self.kept) != len(x):
            self.kept = torch.full_like(x, 0.5)
        return x * self.kept

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block2(self.block1(self.scaled(self.block0(x)))).mean((2, 3)))


class Scaling(Masking):
    """Scales by a tensor that it keeps, in a kernel of its own, of which PyTorch's dispatcher knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.full((1,), 0.5, device="cuda")

    def scaled(self, x: Tensor) -> Tensor:
        return scaled(x, self.kept)


class FromTheHost(Masking):
    """Copies a table from the host at each call."""

    def scaled(self, x: Tensor) -> Tensor:
        table = torch.full((8,), 0.5).pin_memory()
        return x * table.to(x.device, x.dtype, non_blocking=True)[:, None, None]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("backbone", [Masking, Scaling, FromTheHost])
def test_what_graphs_read_lives_on(way: str, backbone: type[Masking], compact: bool) -> None:
    if compact and way != "polled":
        pytest.skip("only 'polled' gathers")
    net = network(backbone=backbone())
    x = clear_batches(net, [8])[0]
    runner = made(net, way, (4, 8), **({"compact": True} if compact else {}))
    wanted = net(x)
    for size in (3, 1, 5):
        if backbone is Masking:
            net(x[:size])  # makes another mask
        net.backbone.kept = None
        gc.collect()
        torch.cuda.synchronize()  # PyTorch hands pinned memory out again once what used it is over
        blocks = [torch.full((8, 8, 32, 32), float("nan"), device="cuda", dtype=torch.float16) for _ in range(8)]
        blocks += [torch.full((1,), float("nan"), device="cuda") for _ in range(512)]
        blocks += [torch.full((size,), float("nan")).pin_memory() for size in (8, 16, 32, 64, 128) for _ in range(16)]
        assert_same(runner(x), wanted)
        del blocks


def test_graphs_keep_the_memory_that_they_were_captured_in() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    layer = nn.Sequential(nn.Linear(1 << 10, 1 << 12), nn.Tanh(), nn.Linear(1 << 12, 1 << 10)).to(device)
    x, y = torch.randn(64, 1 << 10, device=device), torch.empty(64, 1 << 10, device=device)
    streams = take_streams(device, 0)
    with torch.no_grad():
        warm_up(lambda: layer(x), lambda: None, streams.trunk)
        capture = Capture(device, MemoryPool(device))
        with capture.capturing(streams.trunk, layer):
            y.copy_(layer(x))
        graphs, wanted = capture.graphs, layer(x)
    del capture
    gc.collect()
    torch.cuda.empty_cache()
    with untouched([1 << 18, 1 << 20, 1 << 21, 1 << 24], 24):
        graphs[0].launch(streams.trunk)
    assert torch.allclose(y, wanted, atol=1e-5)
    graphs.clear()
    streams.give_back()


def test_making_a_runner_takes_no_more_memory_than_a_plain_graph(way: str) -> None:
    net = EarlyExitNetwork(Wide(), {tap: FusedAuxHead(64, 5) for tap in Wide.taps}, 1.0).cuda().half().eval()
    x = torch.randn(16, 64, 256, 256, device="cuda", dtype=torch.half)
    make_runner(net, x[:1], exits=way).close()

    def most(make: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        made = make()
        peak = torch.cuda.max_memory_reserved() - before
        del made
        return peak

    def plain() -> object:
        graph, static = torch.cuda.CUDAGraph(), x.clone()
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(3):
                net.backbone(static)
        with torch.no_grad(), torch.cuda.graph(graph, stream=stream):  # empties the cache
            y = net.backbone(static)
        return graph, static, y

    graph = most(plain)
    runner = most(lambda: make_runner(net, x, exits=way, batch_sizes=(16,)))
    activations = 3 * x.nbytes
    assert runner <= graph + 2 * x.nbytes + 64 * 2**20, (runner / x.nbytes, graph / x.nbytes, activations / x.nbytes)


def test_a_runner_is_made_where_others_have_left_little_in_the_cache(way: str) -> None:
    net = network()
    free, _ = torch.cuda.mem_get_info()
    kept = [torch.empty(1 << 28, device="cuda", dtype=torch.uint8) for _ in range(4)]
    del kept  # in the cache of PyTorch's allocator
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + (8 << 20)) / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        runner = made(net, way, (8,))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    x = clear_batches(net, [8])[0]
    assert_same(runner(x), net(x))


# Indices


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", ["Unpooling", "Pruning", "Shifting"])
def test_indices_that_cross_a_tap_are_never_read_when_overwritten(way: str, kind: str, compact: bool) -> None:
    """In a process of its own: a wrong index ends the CUDA context."""
    if compact and way != "polled":
        pytest.skip("only 'polled' gathers")
    code = f"""
import torch
from auxhead.kernels.cuda.lifetimes import MemoryPool
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_runner
from auxhead.model.runners.capture import Capture, warm_up
from auxhead.model.runners.captures import take_streams
from auxhead.model.runners import compacting, gated, polled
from support.index_networks import {kind}
polled._LEAST_SEGMENT_US = gated._LEAST_GATED_US = compacting._LEAST_STOP_US = 0.0
compacting._BUBBLE_US = compacting._MOVE_US = -1e6
torch.manual_seed(0)
backbone = {kind}().cuda().eval()
if {kind!r} == "Shifting":
    x = torch.randint(0, 8, (8, 12), device="cuda")
elif {kind!r} == "Pruning":
    x = torch.randn(8, 12, 16, device="cuda")
else:
    x = torch.randn(8, 3, 32, 32, device="cuda")
heads = {{tap: FusedAuxHead(None, 5) for tap in {kind}.taps}}
net = EarlyExitNetwork(backbone, heads, 0.25, example_input=x).cuda().eval()
runner = make_runner(net, x, exits={way!r}, batch_sizes=(4, 8){", compact=True" if compact else ""})
for size in (8, 3, 8, 4, 1, 8):
    found, wanted = runner(x[:size].clone()), net(x[:size].clone())
    assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    assert (found.confidence - wanted.confidence).abs().max() < 1e-4
torch.cuda.synchronize()
print(runner.describe())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_number_of_the_round_before_is_not_this_rounds() -> None:
    """A request's number comes again after 2 ** 32 others, which need not have reached the stop."""
    net = network()
    (x,) = clear_batches(net, [8])
    runner = made(net, "polled", (8,))
    (batch,) = runner._captured.values()

    def ask(number: int, leaves_at: int) -> None:
        batch.buffers.requests.fill_(number - 1)
        batch.count_requests()
        with exits_at(net, leaves_at):
            assert_same(runner(x), net(x))

    ask(5, leaves_at=1)  # none is open at the second stop
    ask(2**31, leaves_at=0)
    ask(2**32 + 5, leaves_at=len(net.heads))
