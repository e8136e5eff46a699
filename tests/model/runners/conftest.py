"""Fixtures of the runners' tests: CUDA simulated, with kernels interpreted."""

import pytest
import torch
from auxhead.kernels import runs_triton


@pytest.fixture
def simulation():
    """Simulated CUDA, where a kernel can be interpreted and there is no real one."""
    if torch.cuda.is_available() or not runs_triton(torch.empty(1)):
        pytest.skip("simulates CUDA, with Triton's interpreter")
    from support.simulated_cuda import simulated_cuda

    with simulated_cuda():
        yield


@pytest.fixture
def idle(simulation):
    """What kernels write is of no matter."""
    from support.simulated_cuda import idle_kernels

    with idle_kernels():
        yield
