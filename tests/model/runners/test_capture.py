"""Errors in a capture name the layer, and runners that live at once have streams of their own."""

import re

import pytest
import torch
from auxhead.model.runners import captures
from auxhead.model.runners.capture import naming_layers
from support.example_models import SmallNet
from torch import Tensor, nn


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize("block", SmallNet.taps)
def test_an_error_in_a_capture_names_the_innermost_layer(block: str) -> None:
    net = SmallNet().eval()
    net.get_submodule(block)[1] = Failing(RuntimeError("CUDA error: not permitted\nCompile with TORCH_USE_CUDA_DSA"))
    message = (
        f"backbone: layer '{block}.1' cannot be captured in a CUDA graph (RuntimeError: CUDA error: not permitted); it "
        "may make the host wait, or branch on the value of a tensor. The eager runner runs it as it is"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)), naming_layers(net):
        net(torch.randn(1, 3, 8, 8))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_no_layer_is_blamed_for_a_lack_of_memory() -> None:
    net = SmallNet().eval()
    net.block1[1] = Failing(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"), naming_layers(net):
        net(torch.randn(1, 3, 8, 8))


def test_a_failure_in_the_module_of_a_head_names_its_layer() -> None:
    network = nn.ModuleDict({"backbone": nn.Linear(2, 2), "heads": nn.ModuleList([nn.Sequential(nn.Linear(3, 2))])})
    with (
        pytest.raises(RuntimeError, match="layer 'heads.0.0' cannot be captured"),
        naming_layers(network["backbone"], network),
    ):
        network["heads"][0](network["backbone"](torch.ones(1, 2)))


def test_runners_that_live_at_once_capture_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_free", {})
    monkeypatch.setattr(captures, "new_stream", lambda device, priority: object())
    monkeypatch.setattr(captures, "MemoryPool", lambda device: object())
    monkeypatch.setattr(captures.CaptureStreams, "allocate_workspaces", lambda self, _stream: None)
    device = torch.device("cuda", 0)
    mine, other = (captures.take_streams(device, -1) for _ in range(2))
    assert len({mine.trunk, mine.side, other.trunk, other.side}) == 4
    mine.give_back()
    assert captures.take_streams(device, 0) is not mine, "of another priority"
    assert captures.take_streams(device, -1) is mine, "their workspaces are there"
    assert captures.take_streams(device, -1) not in (mine, other)
