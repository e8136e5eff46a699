"""Copies of a runner, and what a closed one says."""

import copy
import gc
import pickle

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork, make_runner
from support.example_models import SmallNet, plain_heads
from support.simulated_cuda import simulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates CUDA, which is here")


@pytest.fixture(scope="module")
def network() -> EarlyExitNetwork:
    if not runs_triton(torch.empty(1)):
        pytest.skip("needs Triton's interpreter")
    torch.manual_seed(0)
    return EarlyExitNetwork(SmallNet(), plain_heads(), 0.5).eval()


@pytest.mark.parametrize("exits", ["overlapped", "polled", "gated"])
def test_dropping_a_copy_leaves_the_runner_open(network: EarlyExitNetwork, exits: str) -> None:
    x = torch.randn(1, 3, 8, 8)
    with simulated_cuda():
        runner = make_runner(network, x, exits=exits, batch_sizes=(1,))
        other = copy.copy(runner)
        assert torch.equal(other(x).label, runner(x).label)
        del other
        gc.collect()
        runner(x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_runner_is_neither_copied_deeply_nor_pickled(network: EarlyExitNetwork, duplicate: object) -> None:
    with simulated_cuda():
        runner = make_runner(network, torch.randn(1, 3, 8, 8), exits="overlapped", batch_sizes=(1,))
        with pytest.raises(TypeError, match="a runner holds graphs of this process"):
            duplicate(runner)  # type: ignore[operator]


@pytest.mark.parametrize("exits", ["overlapped", "polled", "gated"])
def test_a_closed_runner_says_so(network: EarlyExitNetwork, exits: str) -> None:
    x = torch.randn(1, 3, 8, 8)
    with simulated_cuda():
        runner = make_runner(network, x, exits=exits, batch_sizes=(1,))
        runner.close()
        for ask in (runner.describe, runner.refresh, lambda: runner.trunk, lambda: runner(x)):
            with pytest.raises(RuntimeError, match="^this runner is closed$"):
                ask()


@pytest.mark.parametrize(
    "options",
    [
        {"exits": "overlapped"},
        {"exits": "polled"},
        {"exits": "polled", "compact": True},
        {"exits": "gated"},
    ],
)
def test_a_closed_runner_holds_no_memory(network: EarlyExitNetwork, options: dict[str, object]) -> None:
    x = torch.randn(2, 3, 4, 4)
    with simulated_cuda():
        make_runner(network, x, batch_sizes=(1, 2), trunk="cudnn", **options).close()
        before = storages()
        runner = make_runner(network, x, batch_sizes=(1, 2), trunk="cudnn", **options)
        runner(x)
        assert storages() > before
        runner.close()
        assert storages() == before


def storages() -> set[int]:
    """What tensors there are lie in, but for what was there before the tests."""
    gc.collect()
    return {one.untyped_storage()._cdata for one in gc.get_objects() if isinstance(one, torch.Tensor)}
