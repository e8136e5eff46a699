"""Captures: errors name the layer; streams are each runner's own; what is read lives on; changed inputs are seen."""

import re

import pytest
import torch
from auxhead.model import EarlyExitNetwork
from auxhead.model.runners import captures
from auxhead.model.runners.capture import CapturedReads, naming_layers
from auxhead.model.runners.captured_network import CapturedNetwork
from auxhead.model.runners.program import StaticInput
from support.example_models import SmallNet, plain_heads
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _disable_current_modes


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


def values(*sizes: int) -> Tensor:
    """Memory of no host, which would be kept in any case."""
    return torch.ones(*sizes, device="meta")


def watched(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def test_what_is_read_lives_and_what_is_made_goes() -> None:
    mask, x = values(3), values(3)
    kept, reads = watched(mask), CapturedReads([])
    with reads:
        made = x * mask
        gone = watched(made)
        made = made + 1
    del mask, made
    assert not kept.expired() and gone.expired()
    del reads
    assert kept.expired()


def test_memory_that_lies_where_something_made_was_is_read_all_the_same() -> None:
    """A storage may get the address of another one that has gone."""
    reads = CapturedReads([])
    with reads:
        values(3) + 1
        with _disable_current_modes():
            others = [values(3) for _ in range(64)]
        kept = [watched(other) for other in others]
        for other in others:
            other + 1
    del others, other
    assert not any(one.expired() for one in kept)


@pytest.mark.parametrize("called", [False, True])
def test_tensors_inside_a_tensor_of_another_class_live(called: bool) -> None:
    parts = values(3), values(3)
    layer = nn.Identity()
    layer.scale = TwoTensor(*parts)
    kept, reads = [watched(part) for part in parts], CapturedReads([] if called else [layer])
    with reads:
        if called:
            made = layer.scale * 2
            gone = [watched(part) for part in (made.a, made.b)]
            made = made * 2
            del made
            assert all(one.expired() for one in gone)
    del layer, parts
    assert not any(one.expired() for one in kept)
    del reads


def test_memory_that_a_layer_gives_back_by_resizing_is_noticed() -> None:
    layer = nn.Linear(3, 3)
    layer.positions = torch.arange(4)
    x, unread = torch.ones(4), torch.arange(2)
    reads = CapturedReads([layer])
    with reads:
        x = x + layer.positions
    network = EarlyExitNetwork(SmallNet(), plain_heads(), 0.5, example_input=torch.randn(2, 3, 8, 8))
    captured = CapturedNetwork(network)
    captured.resizable = reads.resizable([x])
    torch.arange(2, out=layer.positions)
    torch.arange(1 << 16, out=unread)
    captured.check_not_resized()
    torch.arange(1 << 16, out=layer.positions)
    with pytest.raises(RuntimeError, match="resized in place since the capture"):
        captured.check_not_resized()


def test_a_change_in_place_is_seen_that_leaves_the_example_as_it_is() -> None:
    static = StaticInput(torch.zeros(4, 3, dtype=torch.int64))
    static.refill()
    static.x.mul_(2)  # of other batches it would make other indices at each run
    static.look_for_changes()
    assert static.changes
