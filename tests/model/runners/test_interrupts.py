"""Ctrl-C at the lines of a capture and of a request, simulated on the CPU: all is as it was, and a retry succeeds."""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork, make_runner
from auxhead.model.runners.capture import CAPTURE_LOCK
from support import stream_order
from support.example_models import SmallNet, plain_heads
from support.interrupts import interrupted_at, lines_of
from support.simulated_cuda import simulated_cuda
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates CUDA, which is here")

#: One line in so many is interrupted at, each in its turn: all take minutes.
EVERY = 12


@pytest.fixture(scope="module", autouse=True)
def simulation() -> Iterator[None]:
    if not runs_triton(torch.empty(1)):
        pytest.skip("needs Triton's interpreter")
    with simulated_cuda(), ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def network() -> EarlyExitNetwork:
    torch.manual_seed(0)
    net = EarlyExitNetwork(SmallNet(), plain_heads(), 0.5, example_input=torch.randn(2, 3, 4, 4)).eval()
    return net


def assert_as_before(network: EarlyExitNetwork, pool: ThreadPoolExecutor, stream: stream_order.Stream) -> None:
    assert gc.isenabled() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert stream_order.order.current is stream
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in network.modules())
    assert pool.submit(taken_and_released, CAPTURE_LOCK).result(), "another thread could never make a runner"


def taken_and_released(lock: object) -> bool:
    taken = lock.acquire(blocking=False)  # type: ignore[attr-defined]
    if taken:
        lock.release()  # type: ignore[attr-defined]
    return taken


WAYS: dict[str, dict[str, object]] = {
    "overlapped": {"exits": "overlapped", "forks": ("block0",)},
    "polled": {"exits": "polled"},
    "gated": {"exits": "gated"},
}


@pytest.mark.parametrize("way", WAYS)
def test_at_the_lines_of_a_capture(network: EarlyExitNetwork, way: str, simulation: ThreadPoolExecutor) -> None:
    x, stream = torch.randn(1, 3, 4, 4), stream_order.order.current

    made = []

    def make() -> None:
        made.append(make_runner(network, x, **WAYS[way]))

    make()  # frees what an interrupt in another test has left
    first = list(WAYS).index(way)
    for line in lines_of(make, "model/runners", "model/listening/taps")[first::EVERY]:
        assert interrupted_at(line, make, "model/runners", "model/listening/taps"), line
        assert_as_before(network, simulation, stream)
    make()
    assert_answers(made[-1], network, x)


@pytest.mark.parametrize("way", WAYS)
def test_at_the_lines_of_a_request(network: EarlyExitNetwork, way: str, simulation: ThreadPoolExecutor) -> None:
    x, other, stream = torch.randn(2, 3, 4, 4), torch.randn(1, 3, 4, 4), stream_order.order.current
    runner = make_runner(network, x, batch_sizes=(2,), **WAYS[way])
    runner(x)

    def ask() -> None:  # of another size than the one before
        runner(other)

    first = list(WAYS).index(way)
    for line in lines_of(ask, "model/runners")[first::EVERY]:
        runner(x)
        if interrupted_at(line, ask, "model/runners"):
            assert_as_before(network, simulation, stream)
            assert simulation.submit(taken_and_released, runner._busy).result(), line
        assert_answers(runner, network, other)


def assert_answers(runner: Callable, network: EarlyExitNetwork, x: Tensor) -> None:
    found, wanted = runner(x), network(x)
    assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
    assert (found.confidence - wanted.confidence).abs().max() < 1e-5
