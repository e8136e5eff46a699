"""No memory for an allocation, an error at a hook or a launch, Ctrl-C, on the simulated CUDA: then all is as before."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from auxhead.kernels import ExitLaunch, runs_triton
from auxhead.model import EarlyExitNetwork, ExitResult, Runner, make_runner
from auxhead.model.runners import compacting, graph_runner
from auxhead.model.runners.capture import CAPTURE_LOCK
from support import graph_runner_cases, stream_order
from support import simulated_cuda as simulation
from support.example_models import SmallNet, plain_head
from support.failing import Call, Failure, Made, allocations, fails_at, out_of_memory_at, steps
from support.interrupts import interrupted_at, lines_of
from support.simulated_cuda import idle_kernels, simulated_cuda
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates CUDA, which is here")

#: One place in so many fails, each in its turn: all take minutes.
EVERY = 36

WAYS = {**graph_runner_cases.WAYS, "overlapped": {"exits": "overlapped", "forks": ("block0",)}}
LAUNCHERS = ((ExitLaunch, "__call__"), (simulation._Graph, "launch"))


@pytest.fixture(scope="module", autouse=True)
def simulated() -> Iterator[None]:
    if not runs_triton(torch.empty(1)):
        pytest.skip("needs Triton's interpreter")
    with simulated_cuda(), pytest.MonkeyPatch.context() as patch:
        for name in ("_BUBBLE_US", "_MOVE_US"):  # every move pays
            patch.setattr(compacting, name, -1e6)
        yield


@pytest.fixture(scope="module")
def network() -> EarlyExitNetwork:
    torch.manual_seed(0)
    heads = {tap: plain_head(width) for tap, width in zip(SmallNet.taps[:2], SmallNet.widths, strict=False)}
    return EarlyExitNetwork(SmallNet(), heads, 0.5).eval()


@pytest.fixture(scope="module")
def x(network: EarlyExitNetwork) -> Tensor:
    """Three samples, the first of which leaves at the first tap, and the others later."""
    torch.manual_seed(0)
    x = torch.randn(16, 3, 3, 3)
    early = network(x).exit_index == 0
    return torch.cat([x[early][:1], x[~early][:2]])


class Bystanders:
    """A runner from before on the same backbone, and all that is global: as they were, whatever fails."""

    def __init__(self, network: EarlyExitNetwork, x: Tensor) -> None:
        self._network, self._x = network, x
        beside = EarlyExitNetwork(network.backbone, {"block1": plain_head(SmallNet.widths[1])}, 0.5).eval()
        self._runner = make_runner(beside, x, exits="overlapped", batch_sizes=(1,))
        self._answer = self._runner(x)
        self._stream, self._modes = stream_order.order.current, len(_get_current_dispatch_mode_stack())
        gc.collect()  # runners of other tests
        self._lent = simulation.CaptureStreams.lent

    def check(self, *, all_are_back: bool = True) -> None:
        assert gc.isenabled() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert len(_get_current_dispatch_mode_stack()) == self._modes
        assert stream_order.order.current is self._stream
        assert not CAPTURE_LOCK.is_taken()
        assert not all_are_back or simulation.CaptureStreams.lent == self._lent
        parts = list(self._network.modules())
        assert not any(part._forward_hooks or part._forward_pre_hooks or part.training for part in parts)
        assert all(torch.equal(a, b) for a, b in zip(self._runner(self._x), self._answer, strict=True))


Count, Fails = Callable[[EarlyExitNetwork, Call], int], Callable[[int, EarlyExitNetwork, Call], bool]
FAILURES: tuple[tuple[Count, Fails], ...] = (
    (lambda _network, call: allocations(call), lambda n, _network, call: out_of_memory_at(n, call)),
    (lambda network, call: steps(network, call, LAUNCHERS), lambda n, *given: fails_at(n, *given, LAUNCHERS)),
)


@pytest.mark.parametrize("way", WAYS)
def test_in_a_constructor(network: EarlyExitNetwork, x: Tensor, way: str) -> None:
    """Each attempt comes further than the one before, so that it is a retry of that, too."""
    bystanders, wanted = Bystanders(network, x[:1]), network(x[:2])
    sizes, every, kernels = (1,), EVERY, idle_kernels
    if way == "compact":  # it tries moves out
        sizes, every, kernels = (1, 2), 2 * EVERY, nullcontext

    def make() -> Runner:
        network._checked = []  # with a dry run
        return make_runner(network, x[:2], batch_sizes=sizes, **WAYS[way])

    made = Made()
    for count, fails in FAILURES:
        with kernels():
            found = count(network, make)
        for n in range(every * list(WAYS).index(way) // len(WAYS), found, every):
            with made, kernels():
                assert fails(n, network, make), n
            bystanders.check()
    assert_same(make()(x[:2]), wanted)
    assert_same(network(x[:2]), wanted)
    gc.collect()
    assert not made.alive()


@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt])
def test_a_trunk_that_cannot_be_made(
    network: EarlyExitNetwork, x: Tensor, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for the collector, which may find the frames of the error much later."""
    bystanders = Bystanders(network, x[:1])

    def fail(*_: object) -> None:
        raise kind

    monkeypatch.setattr(graph_runner, "make_trunk", fail)
    with pytest.raises(kind) as error:
        make_runner(network, x[:1], exits="overlapped", batch_sizes=(1,))
    bystanders.check()
    assert error.tb is not None


def assert_same(found: ExitResult, wanted: ExitResult) -> None:
    assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    assert (found.confidence - wanted.confidence).abs().max() < 1e-5


REFUSED = {
    "shape": torch.randn(1, 2, 3, 3),
    "dtype": torch.randn(1, 3, 3, 3, dtype=torch.float64),
    "no samples": torch.randn(0, 3, 3, 3),
    "no tensor": None,
}


@pytest.mark.parametrize("way", ["eager", *WAYS])
def test_in_a_request(network: EarlyExitNetwork, x: Tensor, way: str) -> None:
    """The next one is of another size than that which failed."""
    every, options = (EVERY // 3, {"exits": "eager"}) if way == "eager" else (1, WAYS[way])
    runner = make_runner(network, x[:2], batch_sizes=(1, 2), **options)
    wanted = {size: network(x[:size]) for size in (1, 2, 3)}
    bystanders = Bystanders(network, x[:1])
    for size, other in ((2, 1), (3, 2)):  # as captured, and split

        def ask(size: int = size) -> None:
            given = x[:size].clone()
            try:
                runner(given)
            finally:
                given.zero_()  # by the caller, who may write to it from here on

        for count, fails in FAILURES:
            for n in range(every - 1, count(network, ask), every):
                assert fails(n, network, ask), n
                assert_same(runner(x[:other]), wanted[other])
    for refused in REFUSED.values():
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            runner(refused)
    assert_same(runner(x[:2]), wanted[2])
    bystanders.check()


# Ctrl-C

#: One line in so many is interrupted at, each in its turn: all take minutes.
EVERY_LINE = 12
CAPTURE, REQUEST = ("model/runners", "model/listening/taps"), ("model/runners",)
INTERRUPTED = [way for way in WAYS if way != "compact"]


def taken_and_released(lock: Any) -> bool:
    if taken := lock.acquire(blocking=False):
        lock.release()
    return taken


@pytest.mark.parametrize("way", INTERRUPTED)
def test_at_the_lines_of_a_capture_and_of_a_request(network: EarlyExitNetwork, x: Tensor, way: str) -> None:
    bystanders, made = Bystanders(network, x[:1]), []
    wanted = {size: network(x[:size]) for size in (1, 2)}
    first = INTERRUPTED.index(way)

    def make() -> None:
        made.append(make_runner(network, x[:2], **WAYS[way]))

    def ask() -> None:  # of another size than the one before
        made[-1](x[:1])

    with ThreadPoolExecutor(1) as other:
        make()  # frees what an interrupt in another test has left
        for line in lines_of(make, *CAPTURE)[first::EVERY_LINE]:
            assert interrupted_at(line, make, *CAPTURE), line
            bystanders.check(all_are_back=False)
            assert other.submit(taken_and_released, CAPTURE_LOCK).result(), "another thread could never make a runner"
        make()
        runner = made[-1]
        for line in lines_of(ask, *REQUEST)[first::EVERY_LINE]:
            runner(x[:2])
            if interrupted_at(line, ask, *REQUEST):
                assert other.submit(taken_and_released, runner._busy).result(), line
            assert_same(runner(x[:1]), wanted[1])
        assert_same(runner(x[:2]), wanted[2])
    bystanders.check(all_are_back=False)
