"""Copies of a runner, and what a closed one says and holds."""

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


def storages() -> set[int]:
    """What tensors there are lie in."""
    gc.collect()
    return {one.untyped_storage()._cdata for one in gc.get_objects() if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("exits", ["overlapped", "polled", "compact", "gated"])
def test_a_runner_is_there_once_and_gone_when_closed(exits: str) -> None:
    if not runs_triton(torch.empty(1)):
        pytest.skip("needs Triton's interpreter")
    network, x = EarlyExitNetwork(SmallNet(), plain_heads(), 0.5).eval(), torch.randn(2, 3, 4, 4)
    options = {"exits": "polled", "compact": True} if exits == "compact" else {"exits": exits}
    with simulated_cuda():
        make_runner(network, x, batch_sizes=(1, 2), trunk="cudnn", **options).close()
        before = storages()
        runner = make_runner(network, x, batch_sizes=(1, 2), trunk="cudnn", **options)
        other = copy.copy(runner)
        assert torch.equal(other(x).label, runner(x).label)
        del other
        gc.collect()
        runner(x)
        for duplicate in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="a runner holds graphs of this process"):
                duplicate(runner)
        assert storages() > before
        runner.close()
        for ask in (runner.describe, runner.refresh, lambda: runner.trunk, lambda: runner(x)):
            with pytest.raises(RuntimeError, match="^this runner is closed$"):
                ask()
        assert storages() == before
