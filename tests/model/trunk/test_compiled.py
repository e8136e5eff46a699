"""Trunks compiled by Inductor, and any trunk in a CUDA graph."""

import copy

import pytest
import torch
from auxhead.model.trunk.compiled_part import MOST_KINDS, CompiledPart
from auxhead.model.trunk.trunk import make_trunk
from support.example_models import SmallNet
from support.trunk_cases import (
    LAST,
    assert_same,
    assert_untouched,
    branching_inside,
    called,
    conv,
    convolutions,
    fingerprint,
    made,
    needs_compiler,
    outputs,
    replayed,
    torchvision_model,
    trunk_outputs,
    with_odd_norms,
)
from torch import fx, nn

# Compiled


@needs_compiler
def test_compiled_for_good(monkeypatch) -> None:
    # Inductor compiles for most of its time to see which vector instructions there are: make it scalar code
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [], raising=False)
    backbone = with_odd_norms(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))
    # its own patch: monkeypatch would leave it without the option, which the next who compiles in this process wants
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        trunk = made(backbone, [], x := torch.randn(2, 3, 4, 4), "inductor")
        monkeypatch.setattr("torch._inductor.compile", None)  # that was all
        assert_same(trunk, backbone, [], x)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_compiled_between_the_taps(device) -> None:
    backbone = with_odd_norms(SmallNet()).to(device)
    taps = ("block0.2", "block1")
    x = torch.randn(2, 3, 12, 12, device=device)
    before = fingerprint(backbone)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        trunk = made(backbone, taps, x, "inductor")
        assert_untouched(backbone, before)
        for _ in range(2):  # hooks come and go between the runs
            assert_same(trunk, backbone, taps, x)
        with torch.no_grad():
            backbone.fc.weight.mul_(2.0)
        trunk.refresh()
        assert_same(trunk, backbone, taps, x)
    assert trunk.notes[0] == (
        "Compiled between the taps: 3 parts, in which 3 batch norms and 0 sums are folded into convolutions."
    )
    assert trunk.classifier is not None and called(trunk.module)[nn.Identity] == 2
    assert sum(isinstance(part, CompiledPart) for part in trunk.module.children()) == 3


class Odd(nn.Module):
    """Between its taps go numbers, tuples and tensors; one weight is used twice, one layer is skipped."""

    taps = ("first", "second")

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.fc.weight = self.first.weight
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, x):
        samples, halves = x.size(0), x.chunk(2, dim=1)
        y = self.first(torch.cat(halves[::-1], 1) * self.mask)
        return self.fc(self.second(y).view(samples, -1) + x + halves[0].sum())


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_a_part_is_compiled_for_a_few_sizes() -> None:
    backbone = Odd().eval()
    trunk = made(backbone, Odd.taps, torch.randn(1, 6), "inductor")
    for size in range(1, MOST_KINDS + 4):
        assert_same(trunk, backbone, Odd.taps, torch.randn(size, 6))
    parts = [part for part in trunk.module.children() if isinstance(part, CompiledPart)]
    assert len(parts) == 3 and all(len(part._compiled) == MOST_KINDS for part in parts)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_what_goes_from_part_to_part_and_other_sizes() -> None:
    backbone, x = Odd(), torch.randn(3, 6)
    trunk = made(backbone.eval(), Odd.taps, x, "inductor")
    for size in (3, 5, 3):
        assert_same(trunk, backbone, Odd.taps, torch.randn(size, 6))
    with torch.no_grad():
        backbone.mask.normal_()
    backbone.double()  # which gives the parameters other memory
    assert_same(trunk, backbone, Odd.taps, x.double())
    with torch.inference_mode():
        assert_same(trunk, backbone, Odd.taps, torch.randn(7, 6).double())


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_what_is_compiled_under_autocast_runs_under_autocast() -> None:
    backbone, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh()).eval(), torch.randn(2, 4)
    casting = torch.autocast("cpu", torch.bfloat16)
    with casting:
        trunk = made(backbone, (), x, "inductor")
    with torch.no_grad():
        for _ in range(2):
            assert trunk.module(x).dtype == torch.float32
            with casting:
                assert trunk.module(x).dtype == torch.bfloat16


class Limits(nn.Module):
    """Changes in place, through a view, what is read behind it; in examples there is nothing to change."""

    taps = ("first",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.first(x)
        y[:, :4].clamp_(max=9.0)
        return self.fc(y * 2)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_what_is_changed_in_place_is_read_behind_that() -> None:
    backbone, x = Limits().eval(), torch.randn(2, 6)
    trunk = made(backbone, Limits.taps, x, "inductor")
    for size in (1.0, 100.0):
        assert_same(trunk, backbone, Limits.taps, size * x)


class LimitsBehind(Limits):
    """Two parts have the tensor and its view."""

    taps = ("tap",)

    def __init__(self) -> None:
        super().__init__()
        self.tap = nn.Identity()

    def forward(self, x):
        y = self.first(x)
        part = y[:, :4]
        y = self.tap(y)
        part.clamp_(max=9.0)
        return self.fc(y * 2)


def changes_at_the_end(graph, _inputs, options):
    """What compilers make of a graph: what it changes in place is written once all is read."""

    def run(*given):
        own = [each.clone() for each in given]
        outputs = graph(*own)
        for each, changed in zip(given, own, strict=True):
            if not torch.equal(each, changed):
                each.copy_(changed)
        return outputs

    return run


def test_what_shares_memory_with_what_is_changed_in_place_sees_that(monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", changes_at_the_end)
    backbone, x = LimitsBehind().eval(), torch.randn(2, 6)
    trunk = made(backbone, LimitsBehind.taps, x, "inductor")
    for size in (1.0, 100.0):
        assert_same(trunk, backbone, LimitsBehind.taps, size * x)


def test_numbers_that_lie_in_memory_with_the_other_sign(monkeypatch) -> None:
    def reads_memory(graph, _inputs, options):
        return lambda *given: graph(*(torch._neg_view(each) if each.is_neg() else each for each in given))

    monkeypatch.setattr("torch._inductor.compile", reads_memory)
    backbone, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh()).eval(), torch.randn(2, 4)
    trunk = made(backbone, (), x, "inductor")
    assert_same(trunk, backbone, (), x)
    assert_same(trunk, backbone, (), torch._neg_view(x))


class Twice(nn.Module):
    """Attends twice with the same weights, and encodes twice by one layer, which PyTorch's encoder holds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.encoder.layers[1] = self.encoder.layers[0]

    def forward(self, x):
        for _ in range(2):
            x = self.attention(x, x, x)[0]
        return self.encoder(x).mean(1)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_layers_that_occur_twice() -> None:
    backbone, x = Twice().eval(), torch.randn(2, 5, 8)
    trunk = made(backbone, (), x, "inductor")
    for size in (2, 2, 3):
        assert_same(trunk, backbone, (), torch.randn(size, 5, 8))
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.mul_(1.1)


@fx.wrap
def users_own(x):
    """A function of the user's, which a trace calls as it is: it may do something else each time."""
    return torch.relu(x)


class CallsIt(nn.Module):
    def forward(self, x):
        return users_own(x)


def test_functions_of_the_user_are_left_to_dynamo(monkeypatch) -> None:
    given = []
    monkeypatch.setattr(torch, "compile", lambda f, **_: given.append("Dynamo") or f)
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: given.append("Inductor") or graph)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Identity(), CallsIt(), nn.Flatten(), nn.Linear(64, 3))
    x = torch.randn(2, 3, 4, 4)
    assert_same(made(backbone.eval(), ("2",), x, "inductor"), backbone, ("2",), x)
    assert given == ["Dynamo", "Inductor"]


@pytest.mark.parametrize("what", ["hook", "forward"])
@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_what_users_put_on_layers_runs_each_time(what) -> None:
    backbone, x = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    factors = {"now": 1.0}
    if what == "hook":
        backbone[1].register_forward_hook(lambda _layer, _inputs, y: y * factors["now"])
    else:
        backbone[1].forward = lambda y: y.sigmoid() * factors["now"]
    trunk = made(backbone, (), x, "inductor")
    for factor in (1.0, 2.0, 3.0):
        factors["now"] = factor
        assert_same(trunk, backbone, (), x)


class Mobile(nn.Sequential):
    """An inverted residual block as MobileNetV3 has it: depthwise, squeezed and excited."""

    taps = ("expand",)

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 5, 2, 2, groups=16, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1))
        self.project = nn.Conv2d(16, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.depthwise(self.expand(x))
        return self.fc(self.project(x * self.squeeze(x).sigmoid()).mean((2, 3)))


@pytest.mark.parametrize("samples", [1, 33])
def test_squeezing_convolutions_are_written_out(samples, monkeypatch) -> None:
    """For the compiler: those that are left in what it is given are cuDNN's."""
    given = []

    def compiler(graph, _inputs, options):
        given.append(sum(node.target is torch.ops.aten.convolution.default for node in graph.graph.nodes))
        return graph

    monkeypatch.setattr("torch._inductor.compile", compiler)
    backbone, x = with_odd_norms(Mobile()), torch.randn(samples, 3, 11, 9)
    trunk = made(backbone, Mobile.taps, x, "inductor")
    assert_same(trunk, backbone, Mobile.taps, x)
    assert len(given) == 2 and sum(given) == 2, "expand and project, compiled once"
    with_odd_norms(backbone)
    trunk.refresh()
    assert_same(trunk, backbone, Mobile.taps, x)


@pytest.mark.parametrize("padding", [0, 1, (0, 1), "same", "valid"], ids=str)
@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_squeezing_convolutions_with_padding(padding) -> None:
    squeeze = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 6, 1, padding=padding), nn.ReLU(), nn.Conv2d(6, 4, 1)]
    backbone = nn.Sequential(conv(3, 4), *squeeze, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    assert_same(made(backbone, (), x := torch.randn(2, 3, 6, 5), "inductor"), backbone, (), x)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_images_of_one_position_in_four_channels() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)).bfloat16().eval()
    x = torch.randn(2, 3, 1, 1, dtype=torch.bfloat16)
    trunk = made(backbone, (), x, "inductor")
    assert trunk.channels == 4
    assert_same(trunk, backbone, (), x)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_compiled_round_a_branch() -> None:
    backbone = branching_inside()
    taps = ["0", "1.layers.0"]
    x = torch.randn(2, 3, 8, 8)
    trunk = made(backbone, taps, x, "inductor")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for sign in (1, -1):
            assert_same(trunk, backbone, taps, sign * x)
    assert any("Branching" in note for note in trunk.notes)


def test_a_compiler_that_fails_leaves_the_backbone_as_it_is(monkeypatch) -> None:
    def fails(*_args, **_options):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr("torch._inductor.compile", fails)
    backbone = SmallNet().eval()
    trunk = make_trunk(backbone, SmallNet.taps, torch.randn(2, 3, 12, 12), "inductor")
    assert trunk.module is backbone and trunk.notes == ("Not inductor: it failed with RuntimeError: no compiler",)


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "memory_format", "dtype"),
    [
        ("resnet18", LAST, torch.float16),
        ("resnet50", torch.contiguous_format, torch.float16),
        ("mobilenet_v3_small", torch.contiguous_format, torch.float32),
        ("googlenet", LAST, torch.bfloat16),
    ],
    ids=str,
)
@torch.no_grad()
def test_dtypes_layouts_and_replays(name, memory_format, dtype) -> None:
    taps = ["layer1", "layer4.1"] if "resnet" in name else []
    backbone = torchvision_model(name).to("cuda", dtype).to(memory_format=memory_format)
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=dtype).contiguous(memory_format=memory_format)
    trunk = made(backbone, taps, x)
    exact = outputs(copy.deepcopy(backbone).double(), taps, x.double())

    def error(found):
        pairs = zip(found, exact, strict=True)
        return max(((y.double() - truth).abs().max() / truth.abs().max()).item() for y, truth in pairs)

    allowed = 3 * error(outputs(backbone, taps, x)) + 16 * torch.finfo(dtype).eps
    assert error(trunk_outputs(trunk, taps, x)) <= allowed
    if dtype == torch.float16:
        with_relu = [conv for conv in convolutions(trunk) if conv.following == "relu" and conv.groups == 1]
        assert with_relu and all(conv.fused or conv.in_triton for conv in with_relu), trunk.notes

    static = x.contiguous(memory_format=trunk.memory_format)
    graph, y = replayed(lambda: trunk.module(static))
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, trunk.module(static))
        with_odd_norms(backbone)  # and the graph sees what they are now
        trunk.refresh()
        static.normal_()
