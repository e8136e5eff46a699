"""Parts of a trunk that Inductor compiles: how they are cut and traced."""

import pytest
import torch
from auxhead.model.listening.taps import listening
from auxhead.model.trunk import backbone_rewriter
from auxhead.model.trunk.compiled_part import CompiledPart, _fakes, _graph_of
from support.example_models import SmallNet
from support.trunk_cases import LAST, assert_same, made, needs_compiler, replayed, torchvision_model, with_odd_norms
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

# Cut


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "googlenet"])
def test_what_takes_long_to_compile_is_cut_into_pieces(monkeypatch, name: str) -> None:
    monkeypatch.setattr(backbone_rewriter, "_MOST_OF_A_PART", 8)
    backbone, x = torchvision_model(name).eval(), torch.randn(1, 3, 64, 64)
    trunk = made(backbone, [], x, "inductor")
    parts = [each.part for each in trunk.module.modules() if isinstance(each, CompiledPart)]
    sizes = [sum(node.op.startswith("call") for node in part.graph.nodes) for part in parts]
    assert len(parts) > 2 and max(sizes) <= 12
    assert_same(trunk, backbone, [], torch.randn(2, 3, 64, 64))


class Writing(nn.Module):
    """Writes to what it reads later, in pieces that return nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for channel in range(4):
            y[:, channel].mul_(channel).add_(1.0)
        return self.fc(y.relu().mean((2, 3)))


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
@pytest.mark.parametrize("most", [2, 3])
def test_a_piece_may_return_nothing(monkeypatch, most: int) -> None:
    monkeypatch.setattr(backbone_rewriter, "_MOST_OF_A_PART", most)
    backbone, x = Writing().eval(), torch.randn(2, 3, 8, 8)
    trunk = made(backbone, ["first"], x, "inductor")
    assert_same(trunk, backbone, ["first"], torch.randn(2, 3, 8, 8))


def test_pieces_are_about_equal_and_few_values_cross() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = []
    for _ in range(60):  # each of three values, which all go on
        values = [graph.call_function(torch.add, (x, number)) for number in range(3)]
        sums.append(x := graph.call_function(torch.stack, (values,)))
    part = [node for node in graph.nodes if node.op.startswith("call")]
    pieces = backbone_rewriter._pieces(part)
    assert [node for piece in pieces for node in piece] == part
    assert [len(piece) for piece in pieces] == [80, 80, 80]
    assert all(piece[-1] in sums for piece in pieces)
    assert backbone_rewriter._pieces(part[:100]) == [part[:100]] and backbone_rewriter._pieces(part[:1]) == [part[:1]]


# Traced


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_what_has_no_inputs_is_made_anew_at_each_call() -> None:
    """And does not hold what the calls before have added to it."""

    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.zeros(2, 3)
            y += x
            return y

    graph = fx.Graph()
    graph.output(graph.call_module("adds", (graph.placeholder("x"),)))
    part = CompiledPart(fx.GraphModule(nn.ModuleDict({"adds": Adds()}), graph))
    for _ in range(3):
        x = torch.randn(2, 3)
        assert torch.equal(part(x), x)


class Sets(nn.Module):
    """Puts numbers into a tensor, as torchvision's Swin does for its masks."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape)
        y[:, :, 0] = 3
        y[:, :, :, 1] = 0.5
        return x + y


class SetsFirst(SmallNet):
    """A backbone that does so, out of sight for fx."""

    def __init__(self) -> None:
        super().__init__()
        self.block0.insert(0, Hidden())


class Hidden(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return set_numbers(x)


@fx.wrap
def set_numbers(x: Tensor) -> Tensor:
    return Sets()(x)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_numbers_are_on_the_device_of_what_takes_them(device: str) -> None:
    """Traced without a GPU, too: of tensors without memory."""
    graph = fx.Graph()
    graph.output(graph.call_module("sets", (graph.placeholder("x"),)))
    x = torch.randn(2, 3, 4, 4)
    leaves, form = tree_flatten((x,))
    part = CompiledPart(fx.GraphModule(nn.ModuleDict({"sets": Sets()}), graph))
    kinds = [(x.shape, x.stride(), x.dtype, torch.device(device))]
    traced = _graph_of(part._trace([], leaves, form, kinds).graph, _fakes(kinds)[0])
    fills = [node.args[1] for node in traced.graph.nodes if "fill_" in str(node.target)]
    assert len(fills) == 2 and all(("full" in str(node.target)) == (device == "cuda") for node in fills)
    assert all(node.kwargs["device"].type == "cuda" for node in fills if device == "cuda")
    if device == "cpu":
        assert torch.equal(traced(x)[0], Sets()(x))


@needs_compiler
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("net", [SmallNet, SetsFirst])
@torch.no_grad()
def test_a_compiled_trunk_can_be_captured(net: type[SmallNet]) -> None:
    backbone = with_odd_norms(net()).to("cuda", torch.float16).to(memory_format=LAST)
    static = torch.randn(4, 3, 32, 32, device="cuda", dtype=torch.float16).contiguous(memory_format=LAST)
    trunk = made(backbone, SmallNet.taps, static, "inductor")
    seen = []
    with listening(trunk.module, SmallNet.taps, lambda index, _y: seen.append(index)):
        graph, y = replayed(lambda: trunk.module(static))
    assert seen == [0, 1, 2]
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, trunk.module(static))
        static.normal_()
