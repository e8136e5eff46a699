"""Fixtures of the doctor's tests: a fake GPU's streams, and programs that run on it as well as on a real one."""

import pytest
import torch
from auxhead.autotune.doctor.watching import operators, stream_uses, watcher
from support import stream_order
from support.gpu_work import warm_stream

ON_A_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


def current():
    return stream_order.order.current


def fake_gpu(patch):
    """Take CPU tensors for those of a GPU with simulated streams, until the test of ``patch`` ends."""
    stream = torch.cuda.stream
    stream_order.patched(patch)
    for owner, name, fake in (
        (torch, "Stream", stream_order.Stream),
        (torch.cuda, "stream", stream),
        (torch.cuda, "get_sync_debug_mode", lambda: 0),
        (torch.cuda, "set_sync_debug_mode", lambda mode: None),
        (torch.cuda, "is_available", lambda: True),
        (operators, "is_on_gpu", lambda tensor: True),
        (operators, "device_of", lambda tensor: 0),
        (watcher, "current_device", lambda: current().device.index),
        (watcher, "current_stream", lambda device: current().cuda_stream),
        (watcher, "is_capturing", lambda: False),
        (stream_uses, "current_priority", lambda device: current().priority),
        (stream_order.Stream, "device", torch.device("cuda", 0)),
        (stream_order.order, "default", stream_order.Stream(handle=0)),
    ):
        patch.setattr(owner, name, fake)
    return current()


@pytest.fixture
def main(monkeypatch):
    """The default stream of a fake GPU."""
    return fake_gpu(monkeypatch)


@pytest.fixture
def side(main):
    """A stream of its own of that GPU."""
    return torch.cuda.Stream(priority=-1)


@pytest.fixture(params=["fake", *ON_A_GPU])
def where(request, monkeypatch):
    """The device of tensors on a fake GPU, and on a real one."""
    if request.param == "cuda":
        return "cuda"
    fake_gpu(monkeypatch)
    return "cpu"


@pytest.fixture
def other(where):
    """A second stream there, of high priority."""
    return warm_stream() if where == "cuda" else torch.cuda.Stream(priority=-1)
