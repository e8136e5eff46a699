"""Fixtures of the doctor's tests: a fake GPU's streams."""

import pytest
import torch
from support import fake_cuda_streams as fake


@pytest.fixture
def main(monkeypatch):
    """The default stream of a fake GPU."""
    return fake.fake_gpu(monkeypatch)


@pytest.fixture
def side(main):
    """A stream of its own of that GPU."""
    return torch.cuda.Stream(priority=-1)
