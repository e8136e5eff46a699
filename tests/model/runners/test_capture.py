"""Errors in a capture name the layer, and runners that live at once have streams of their own."""

import re

import pytest
import torch
from auxhead.model.runners import capture
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
    with pytest.raises(RuntimeError, match=re.escape(message)), capture._naming_layers(net):
        net(torch.randn(1, 3, 8, 8))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_no_layer_is_blamed_for_a_lack_of_memory() -> None:
    net = SmallNet().eval()
    net.block1[1] = Failing(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory$"), capture._naming_layers(net):
        net(torch.randn(1, 3, 8, 8))


def test_runners_that_live_at_once_capture_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_free_pairs", {})
    monkeypatch.setattr(capture, "_new_stream", lambda device, priority: object())
    device = torch.device("cuda", 0)
    mine, other = (capture.take_streams(device, -1) for _ in range(2))
    assert len({*mine, *other}) == 4
    capture.give_back_streams(device, -1, mine)
    assert capture.take_streams(device, 0) != mine, "of another priority"
    assert capture.take_streams(device, -1) == mine, "their workspaces are there"
    assert capture.take_streams(device, -1) not in (mine, other)
