"""Fixtures of the doctor's tests: a fake GPU's streams, and programs that run on it as well as on a real one."""

import pytest
import torch
from support import fake_cuda_streams as fake
from support.gpu_work import warm_stream

ON_A_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture
def main(monkeypatch):
    """The default stream of a fake GPU."""
    return fake.fake_gpu(monkeypatch)


@pytest.fixture
def side(main):
    """A stream of its own of that GPU."""
    return torch.cuda.Stream(priority=-1)


@pytest.fixture(params=["fake", *ON_A_GPU])
def where(request, monkeypatch):
    """The device of tensors on a fake GPU, and on a real one."""
    if request.param == "cuda":
        return "cuda"
    fake.fake_gpu(monkeypatch)
    return "cpu"


@pytest.fixture
def other(where):
    """A second stream there, of high priority."""
    return warm_stream() if where == "cuda" else torch.cuda.Stream(priority=-1)
