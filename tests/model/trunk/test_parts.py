"""Parts of a trunk that Inductor compiles: how they are cut and traced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from auxhead.model.listening.taps import listening
from auxhead.model.trunk import backbone_rewriter, pieces
from auxhead.model.trunk.compiled_part import CompiledPart
from auxhead.model.trunk.inductor import _graph_of, fakes_of
from auxhead.model.trunk.trunk import make_trunk
from functorch.compile import make_boxed_func
from support.example_models import SmallNet
from support.trunk_cases import (
    LAST,
    assert_same,
    logits,
    made,
    needs_compiler,
    replayed,
    torchvision_model,
    with_odd_norms,
)
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

# Cut


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
@pytest.mark.parametrize("name", ["resnet18", "densenet121", "googlenet"])
def test_what_takes_long_to_compile_is_cut_into_pieces(monkeypatch, name: str) -> None:
    monkeypatch.setattr(pieces, "_MOST_OF_A_PIECE", 8)
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
    monkeypatch.setattr(pieces, "_MOST_OF_A_PIECE", most)
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
    cut = pieces.pieces_of(fx.GraphModule(nn.Module(), graph), [part])
    assert [node for piece in cut for node in piece] == part
    assert [len(piece) for piece in cut] == [60, 60, 60, 60]
    assert all(piece[-1] in sums for piece in cut)
    for short in (part[:60], part[:1]):
        assert pieces.pieces_of(fx.GraphModule(nn.Module(), graph), [short]) == [short]


class Block(nn.Module):
    """A block of a transformer without its attention; or what has no library's product in it."""

    def __init__(self, width: int, own: bool = False) -> None:
        super().__init__()
        self.norm, self.own = nn.LayerNorm(16), own
        self.mlp = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        if self.own:
            return x + F.gelu(F.silu(self.norm(x)) * 2.0 + 1.0).sin().cos() * 0.5
        return x + self.mlp(self.norm(x))


def stack(blocks: list[nn.Module]) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 16)), *blocks, nn.Flatten(), nn.Linear(32, 3)).eval()


def compiled_graphs(monkeypatch, backbone: nn.Module, taps: list[str]) -> tuple[list[fx.GraphModule], list]:
    """What the compiler is given for a backbone, whose trunk answers as it does, and the parts."""
    given = []

    def compiler(graph, inputs, options):
        given.append(graph)
        return graph

    monkeypatch.setattr("torch._inductor.compile", compiler)
    for parameter in backbone.parameters():  # each block has its own
        nn.init.normal_(parameter, std=0.3)
    trunk = made(backbone, taps, torch.randn(2, 32), "inductor")
    assert_same(trunk, backbone, taps, torch.randn(2, 32))
    return given, [each for each in trunk.module.modules() if isinstance(each, CompiledPart)]


@pytest.mark.parametrize("taps", [[], ["3"], ["4", "7"]], ids=str)
def test_blocks_that_are_alike_are_compiled_once(monkeypatch, taps: list[str]) -> None:
    graphs, parts = compiled_graphs(monkeypatch, stack([Block(24) for _ in range(9)]), taps)
    assert len(parts) >= 9 and len(graphs) <= 3 + 2 * len(taps)
    seen = [sum("gelu" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert max(seen) == 1, "one block at a time"


def test_blocks_of_other_sizes_are_not_alike(monkeypatch) -> None:
    graphs, parts = compiled_graphs(monkeypatch, stack([Block(24 + number) for number in range(6)]), [])
    assert len(graphs) == len(parts) == 1


def test_what_a_compiler_fuses_is_not_cut(monkeypatch) -> None:
    """However alike it is: each cut would be a launch."""
    graphs, parts = compiled_graphs(monkeypatch, stack([Block(24, own=True) for _ in range(6)]), [])
    assert len(graphs) == len(parts) == 1


def test_pieces_of_swin_begin_where_no_fusion_is_lost(monkeypatch) -> None:
    """What is read from parameters comes with the attention that reads it, and nothing else crosses but two values."""
    seen: list[tuple[fx.GraphModule, list[list[fx.Node]]]] = []

    def noted(module, parts):
        cut = pieces.pieces_of(module, parts)
        begins = {part[0] for part in parts}
        for piece in cut:
            if piece[0] in begins:
                continue
            inside = set(piece)
            crossing = {each for node in piece for each in node.all_input_nodes if each not in inside}
            assert len(crossing) <= 2 and not any(each.op == "get_attr" for each in crossing)
        seen.append((module, cut))
        return cut

    monkeypatch.setattr(backbone_rewriter, "pieces_of", noted)
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    made(torchvision_model("swin_t").eval(), ["features.1"], torch.randn(1, 3, 64, 64), "inductor")
    assert len(seen[0][1]) > 12


class Gated(nn.Module):
    """Gives values another shape in place, in blocks that are cut between them and who reads them."""

    def __init__(self, gate: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate = gate
        self.layers, self.fc = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.gate(layer, x)
        return self.fc(x)


def unsqueezed(layer: nn.Module, x: Tensor) -> Tensor:
    y, z = x.mean(1).sin().cos().tanh(), layer(x)
    y.unsqueeze_(1)
    return layer(z) + z * y


def transposed(layer: nn.Module, x: Tensor) -> Tensor:
    y = x.sin().cos().tanh()
    z = layer(y)
    y.transpose_(0, 1)
    return layer(z).sin() + y.t()


def set_to_another(layer: nn.Module, x: Tensor) -> Tensor:
    y = x.sin().cos().tanh()
    z = layer(y)
    y.set_(z)
    return layer(z).sin() + y


def where_views_begin(layer: nn.Module, x: Tensor) -> Tensor:
    y = x.sin().cos().tanh()
    view = y[:, 2:]
    return layer(layer(y) + view.storage_offset()) + y


def beyond_views(layer: nn.Module, x: Tensor) -> Tensor:
    y = x.sin().cos().tanh()
    view = y[:, 2:6]
    return layer(layer(y) + view.as_strided((8, 8), (8, 1), 0)) + y


@needs_compiler
@pytest.mark.parametrize("gate", [unsqueezed, transposed, set_to_another, where_views_begin, beyond_views])
def test_what_has_another_shape_or_place_is_seen_beyond_a_cut(monkeypatch, gate) -> None:
    """Of layers that are zero at first no example shows it; compiled in PyTorch's way, but by no compiler."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, inputs, options: aot_function(graph, inputs))
    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, *, options, **rest: compiles(f, backend="aot_eager", **rest))
    backbone = Gated(gate).eval()
    for layer in backbone.layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    trunk = make_trunk(backbone, [], torch.randn(8, 8), "inductor")
    assert "13 parts" in trunk.notes[0] or trunk.module is backbone
    for layer in backbone.layers:
        nn.init.normal_(layer.weight, std=0.3)
    x = torch.randn(8, 8)
    assert torch.allclose(logits(trunk, x), backbone(x), atol=1e-5)


def aot_function(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import aot_module_simplified

    return aot_module_simplified(graph, inputs, fw_compiler=lambda compiled, _inputs: make_boxed_func(compiled.forward))


def test_a_backbones_own_segments_stay(monkeypatch) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.segment_0, self.segment_2 = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.segment_2(self.segment_0(x).sin()).cos())

    monkeypatch.setattr(pieces, "_MOST_OF_A_PIECE", 2)
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    backbone, x = Named().eval(), torch.randn(2, 4)
    trunk = made(backbone, ["segment_0"], x, "inductor")
    assert sum(isinstance(layer, CompiledPart) for layer in trunk.module.modules()) == 3
    assert_same(trunk, backbone, ["segment_0"], x)


class Silent(nn.Linear):
    """Of which nobody can say what it is."""

    def __repr__(self) -> str:
        raise AttributeError("no name")


def test_layers_of_the_users_are_not_asked_what_they_are(monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    compiles = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, *, options, **rest: compiles(f, backend="eager", **rest))
    blocks = [Block(24) for _ in range(3)]
    blocks[1].mlp[2] = Silent(24, 16)
    blocks[1].mlp[2].register_forward_hook(lambda *_: None)
    backbone = stack(blocks)
    assert_same(made(backbone, [], torch.randn(2, 32), "inductor"), backbone, [], torch.randn(2, 32))


def test_a_search_for_what_is_alike_ends(monkeypatch) -> None:
    """It is cubic in the kinds of blocks; cut no further, all is compiled as it is."""
    looks = []
    to_compile = pieces._to_compile
    monkeypatch.setattr(pieces, "_to_compile", lambda *given: looks.append(None) or to_compile(*given))
    monkeypatch.setattr(pieces, "_MOST_LOOKS", 5_000)
    blocks = [Block(width) for width in range(8, 32) for _ in range(2)]
    graphs, parts = compiled_graphs(monkeypatch, stack(blocks), [])
    assert len(looks) < 60 and len(parts) >= len(graphs) > 2


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
    traced = _graph_of(part._trace([], leaves, form, kinds).graph.graph, fakes_of(kinds)[0])
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
