"""Out of memory at each allocation of a constructor, errors at hooks and launches, and Ctrl-C, on a GPU.

What was there before works as before, memory of others is not written to, and a retry succeeds.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from auxhead.kernels import ExitLaunch
from auxhead.kernels.cuda.runtime import capture_id
from auxhead.model import EarlyExitNetwork, FusedAuxHead, Runner, make_runner
from auxhead.model.network.exits_repeat import ExitsRepeat
from auxhead.model.runners import captures
from auxhead.model.runners.capture import CAPTURE_LOCK, Graph
from support.every_runner import EVERY as RUNNERS
from support.example_models import Wide, needs_gpu
from support.failing import Call, allocations, fails_at, out_of_memory_at, steps
from support.graph_runner_cases import assert_identical, assert_same, clear_batches, images, network, untouched
from torch import Tensor, nn

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap", "every_move_pays")]

#: Places to fail at in one test, evenly spread over all that there are.
MOST = 20
GRAPHS = [name for name in RUNNERS if name != "eager"]
LAUNCHERS = ((ExitLaunch, "__call__"), (ExitsRepeat, "launch"), (Graph, "launch"))


@pytest.fixture
def every_move_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, us in (("_LEAST_STOP_US", 0.0), ("_BUBBLE_US", -1e6), ("_MOVE_US", -1e6)):
        monkeypatch.setattr(f"auxhead.model.runners.compacting.{name}", us)


class Case:
    """A network, its batches, and what a failure has to leave as it was: another runner, and all that is global."""

    def __init__(self, name: str) -> None:
        self.net = network()
        self.x, self.other = clear_batches(self.net, [8, 3])
        self.wanted, self.wanted_of_other = self.net(self.x), self.net(self.other)
        self._options = {"batch_sizes": (4, 8) if name == "compact" else (8,), **RUNNERS[name]}
        bystander = network()
        self._bystander = make_runner(bystander, self.x, batch_sizes=(8,), exits="overlapped")
        self.make().close()  # kernels are compiled, and streams there for the next one, with cuBLAS's workspaces
        self._identical = self._bystander(self.x)
        # What is launched is under way for long after the host has gone on.
        self.net.backbone.register_forward_pre_hook(sleep)
        self.settle()
        self._held, self._reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        self._hooks = self._count_hooks()

    def make(self) -> Runner:
        self.net._checked = []  # with a dry run
        return make_runner(self.net, self.x, **self._options)

    def retry(self) -> None:
        with self.make() as runner:
            assert_same(runner(self.x), self.wanted)
            assert_same(runner(self.other), self.wanted_of_other)
        assert_same(self.net(self.x), self.wanted)

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def check(self) -> None:
        assert gc.isenabled() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert not CAPTURE_LOCK.is_taken()
        assert self._count_hooks() == self._hooks
        for pair in (pair for pairs in captures._free.values() for pair in pairs):
            assert capture_id(pair.trunk.cuda_stream) is capture_id(pair.side.cuda_stream) is None
        assert pool_of(torch.empty(12345, device="cuda")) == (0, 0), "this thread allocates from a pool of ours"
        assert_random_numbers()
        assert_identical(self._bystander(self.x), self._identical)

    def check_memory(self) -> None:
        """Compare with what was held before any failure; the last error is gone."""
        self.settle()
        assert torch.cuda.memory_allocated() == self._held
        assert torch.cuda.memory_reserved() <= self._reserved + (2 << 20)  # a small block may lie in another segment

    def _count_hooks(self) -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in self.net.modules())


def sleep(*_: object) -> None:
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda._sleep(3_000_000)


def pool_of(tensor: Tensor) -> tuple[int, int]:
    for segment in torch.cuda.memory_snapshot():
        if 0 <= tensor.data_ptr() - segment["address"] < segment["total_size"]:
            return tuple(segment["segment_pool_id"])
    raise AssertionError("in no segment")


def assert_random_numbers() -> None:
    """PyTorch's generator of the device counts on, and by the seed alone; a failed capture of torch's own stops it."""
    state = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(1)
    first, second = torch.rand(8, device="cuda"), torch.rand(8, device="cuda")
    torch.cuda.manual_seed(1)
    assert torch.equal(first, torch.rand(8, device="cuda")) and not torch.equal(first, second)
    torch.cuda.set_rng_state(state)


def spread(count: int) -> range:
    return range(0, count, -(-count // MOST))


FAILURES: dict[str, tuple[Callable[..., int], Callable[..., bool]]] = {
    "memory": (lambda _net, call: allocations(call), lambda n, _net, call: out_of_memory_at(n, call)),
    "error": (lambda net, call: steps(net, call, LAUNCHERS), lambda n, net, call: fails_at(n, net, call, LAUNCHERS)),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", GRAPHS)
def test_in_a_constructor(name: str, failure: str) -> None:
    case = Case(name)
    count, fails = FAILURES[failure]
    for i, n in enumerate(spread(count(case.net, lambda: case.make().close()))):
        assert fails(n, case.net, case.make), n
        with untouched():
            case.check()
        if i % 8 == 0:
            case.check_memory()
    case.retry()
    case.check_memory()


@pytest.mark.parametrize("name", RUNNERS)
def test_in_a_request(name: str) -> None:
    case = Case(name)
    large, wanted_of_large = torch.cat([case.x, case.other]), case.net(torch.cat([case.x, case.other]))
    with case.make() as runner:
        for x, next_x, wanted in (
            (case.x, case.other, case.wanted_of_other),
            (case.other, large, wanted_of_large),
            (large, case.x, case.wanted),
        ):

            def ask(x: Tensor = x) -> object:
                return runner(x)

            ask()  # launches that are noted at first are repeated from then on
            for count, fails in FAILURES.values():
                for n in spread(count(case.net, ask)):
                    assert fails(n, case.net, ask), n
                    with untouched():
                        assert_same(runner(next_x), wanted)
        for refused in (case.x.double(), case.x[:0], case.x[0], None):
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                runner(refused)
        case.check()
        assert_same(runner(case.x), case.wanted)


# What only a GPU has


@pytest.mark.parametrize("name", GRAPHS)
def test_the_device_has_no_memory(name: str) -> None:
    """The allocator refuses by itself, wherever that is, in libraries and in captures too."""
    limits = 16
    net = EarlyExitNetwork(Wide(), {tap: FusedAuxHead(64, 5) for tap in Wide.taps}, 0.25).cuda().half().eval()
    x = torch.randn(4, 64, 256, 256, device="cuda", dtype=torch.half)
    small, bystander = images(8), make_runner(network(), images(8), batch_sizes=(8,), exits="overlapped")
    wanted, identical = net(x), bystander(small)

    def make() -> Runner:
        return make_runner(net, x, batch_sizes=(2, 4) if name == "compact" else (4,), **RUNNERS[name])

    make().close()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, held = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    make().close()
    needed = torch.cuda.max_memory_reserved() - before
    total, failed = torch.cuda.get_device_properties(0).total_memory, 0
    for i in range(limits):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((before + needed * i // limits) / total)
        try:
            make().close()
        except torch.OutOfMemoryError:
            failed += 1
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        with untouched():
            assert_identical(bystander(small), identical)
        assert_random_numbers()
        gc.collect()
        assert torch.cuda.memory_allocated() == held
    assert failed >= limits // 2, "the limits were too high"
    with make() as runner:
        assert_same(runner(x), wanted)


def ask(y: Tensor) -> None:
    y.float().sum().item()


def ask_and_go_on(y: Tensor) -> None:
    try:
        ask(y)
    except RuntimeError:
        pass


def wait(_y: Tensor) -> None:
    torch.cuda.current_stream().synchronize()


def draw(y: Tensor) -> None:
    torch.rand_like(y)


def multiply_and_ask(y: Tensor) -> None:
    z = y.flatten(1)
    ask(z @ z.T)


@pytest.mark.parametrize("breaks", [ask, ask_and_go_on, wait, draw, multiply_and_ask])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_hook_that_breaks_the_capture(name: str, breaks: Call) -> None:
    case = Case(name)
    for layer in ("block0", "block2.1", "fc"):

        def hook(_layer: nn.Module, _inputs: object, y: Tensor) -> None:
            if torch.cuda.is_current_stream_capturing():
                breaks(y)

        handle = case.net.backbone.get_submodule(layer).register_forward_hook(hook)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                case.make()
        handle.remove()
        with untouched():
            case.check()
    graph, y = torch.cuda.CUDAGraph(), torch.ones(64, device="cuda")
    with torch.cuda.graph(graph):  # PyTorch's own, with random numbers in it
        z = torch.nn.functional.dropout(y, 0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert set(z.tolist()) == {0.0, 2.0}
    case.retry()
