"""Linear layers of a backbone, with the activations behind them, as launches of Triton."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.model import make_trunk
from auxhead.model.trunk import fused_linear, timed_convolutions
from auxhead.model.trunk.fused_linear import FusedLinear
from support.trunk_cases import TRITON, assert_same, called, made, outputs, sooner, trunk_outputs
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

pytestmark = TRITON
HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def in_triton(monkeypatch):
    sooner(monkeypatch, True)
    torch.manual_seed(0)


def linears(trunk) -> list[FusedLinear]:
    return [module for module in trunk.module.modules() if isinstance(module, FusedLinear)]


def note(count: int) -> str:
    return f"Linear layers that run with what follows as one launch of Triton: {count}."


class Mixing(nn.Module):
    """Linear layers of tokens, each with another activation, or with what is none."""

    def __init__(self) -> None:
        super().__init__()
        gelus = nn.GELU(), nn.GELU("tanh")
        followed = *gelus, nn.ReLU(inplace=True), nn.SiLU(), nn.Hardswish(), nn.ReLU6(), nn.ELU(), nn.Identity()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=n % 3 > 0), f) for n, f in enumerate(followed))
        self.first, self.second, self.twice = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 16)
        self.odd, self.fc = nn.Linear(16, 20), nn.Linear(20, 5)  # 20 are not Triton's

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        x = self.second(F.gelu(self.first(x), approximate="tanh"))
        y = self.twice(x)
        return self.fc(F.gelu(self.odd(F.gelu(y) + y)).mean(1))


def mixing(device, dtype=torch.float16) -> tuple[nn.Module, Tensor]:
    return Mixing().eval().to(device, dtype), torch.randn(2, 7, 16, device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_linear_layers_are_one_launch_with_what_follows(device, kind: str, dtype: torch.dtype) -> None:
    backbone, x = mixing(device, dtype)
    trunk = made(backbone, (), x, kind)
    found = [(linear.following, linear.in_triton) for linear in linears(trunk)]
    assert found == [
        *((name, True) for name in ("gelu", "gelu_tanh", "relu", "silu", "hardswish", "relu6", "", "", "gelu_tanh")),
        ("", True), ("", True), ("gelu", False),
    ]  # fmt: skip
    assert note(11) in trunk.notes
    for _ in range(2):
        assert_same(trunk, backbone, (), x)
        with torch.no_grad():  # the user's own parameters are read: nothing is to be refreshed
            backbone.layers[0][0].weight.mul_(2.0)
            backbone.first.bias.add_(1.0)
    for other in (x[:1], torch.randn(3, 5, 16, device=device, dtype=dtype), x.mT.contiguous().mT):
        assert_same(trunk, backbone, (), other)


def test_attention_multiplies_so_too(device) -> None:
    backbone = VisionTransformer(16, 8, 1, 2, 32, 64, num_classes=5).eval()
    nn.init.normal_(backbone.heads.head.weight)
    backbone, x = backbone.to(device, torch.float16), torch.randn(2, 3, 16, 16, device=device, dtype=torch.float16)
    trunk = made(backbone, ("encoder.layers.encoder_layer_0.mlp",), x)
    assert [linear.following for linear in linears(trunk)] == ["", "", "gelu", ""] and note(4) in trunk.notes
    assert_same(trunk, backbone, ("encoder.layers.encoder_layer_0.mlp",), x)


def test_attention_within_windows_multiplies_so_too(device) -> None:
    sizes = {"patch_size": [2, 2], "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": [3, 4]}
    backbone = SwinTransformer(**sizes, num_classes=5).eval().to(device, torch.float16)
    x = torch.randn(2, 3, 12, 16, device=device, dtype=torch.float16)
    trunk = made(backbone, ("features.1.0",), x)
    assert [linear.following for linear in linears(trunk)] == ["", "", "gelu", ""] * 2 and note(8) in trunk.notes
    assert_same(trunk, backbone, ("features.1.0",), x)


def test_what_a_tap_returns_is_what_the_layer_does(device) -> None:
    backbone, x = mixing(device)
    taps = ("layers.0.0", "layers.1")
    trunk = made(backbone, taps, x)
    assert [linear.following for linear in linears(trunk)][:2] == ["", "gelu_tanh"]
    assert_same(trunk, backbone, taps, x)


@pytest.mark.parametrize("case", ["slower", "wrong", "fails", "many products"])
def test_what_is_slower_or_wrong_is_left(device, monkeypatch, case: str) -> None:
    backbone, x = mixing(device)
    right = fused_linear.fused_conv2d

    def fails(*_given: object) -> Tensor:
        raise RuntimeError("of a compiler")

    if case == "slower":
        sooner(monkeypatch, False)
    elif case == "wrong":
        monkeypatch.setattr(fused_linear, "fused_conv2d", lambda *given: right(*given) * 1.5 + 1.0)
    elif case == "fails":
        monkeypatch.setattr(fused_linear, "fused_conv2d", fails)
    else:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
        monkeypatch.setattr(timed_convolutions, "MOST_UNTIMED_PRODUCTS", 2 * 7 * 16 * 16 - 1)
    trunk = made(backbone, (), x)
    assert not any(linear.in_triton for linear in linears(trunk)) and note(11) not in trunk.notes
    assert_same(trunk, backbone, (), x)


def test_few_products_are_tritons_where_nothing_is_timed(device, monkeypatch) -> None:
    backbone, x = mixing(device)
    timed = sooner(monkeypatch, False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert timed_convolutions.times_nothing()
    assert note(11) in made(backbone, (), x).notes and not timed


def test_layers_of_float32_are_left(device) -> None:
    backbone, x = mixing(device, torch.float32)
    trunk = make_trunk(backbone, (), x, "cudnn")
    assert not linears(trunk) and called(trunk.module)[nn.Linear] == 12
    assert_same(trunk, backbone, (), x)


@pytest.mark.parametrize("case", ["autocast", "gradient", "negated", "a vector", "no tokens", "strided"])
def test_what_triton_does_not_take_is_pytorchs(device, case: str) -> None:
    linear = FusedLinear(*nn.Linear(16, 8, device=device, dtype=torch.float16).parameters(), "gelu")
    x = torch.randn(2, 3, 16, device=device, dtype=torch.float16)
    linear.choose(x)
    assert linear.in_triton
    if case == "negated":
        x = torch._neg_view(x)
    elif case == "a vector":
        x = x[0, 0]
    elif case == "no tokens":
        x = x[:, :0]
    elif case == "strided":
        x = x.transpose(0, 1)
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=case == "autocast"),
        torch.set_grad_enabled(case == "gradient"),
    ):
        found, wanted = linear(x), F.gelu(F.linear(x, linear.weight, linear.bias))
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.requires_grad == (case == "gradient")
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def test_an_exported_trunk_calls_the_operator(device) -> None:
    backbone, x = mixing(device)
    trunk = made(backbone, (), x)
    with torch.no_grad():
        program = torch.export.export(trunk.module, (x,))
        assert sum("fused_conv2d" in str(node.target) for node in program.graph.nodes) == 11
        torch.testing.assert_close(program.module()(x), trunk.module(x), rtol=1e-2, atol=1e-2)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def attending() -> nn.Module:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.fc = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return Attends().eval()


@pytest.mark.parametrize("case", ["computed", "a buffer", "computed, of an attention", "a buffer of an attention"])
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_weights_that_are_no_parameters_are_read_at_each_call(device, kind: str, case: str) -> None:
    torch.manual_seed(0)
    tokens = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Flatten(), nn.Linear(112, 5))
    backbone = attending() if "attention" in case else tokens
    layer = backbone.attention.out_proj if "attention" in case else backbone[0]
    backbone, x = backbone.eval().to(device, torch.float16), torch.randn(2, 7, 16, device=device, dtype=torch.float16)
    if "computed" in case:
        parametrize.register_parametrization(layer, "weight", Twice())
        changed = layer.parametrizations.weight.original
    else:
        changed = layer.weight.detach().clone()
        del layer.weight
        layer.register_buffer("weight", changed)
    trunk = made(backbone, (), x, kind)
    for _ in range(2):
        torch.testing.assert_close(trunk_outputs(trunk, (), x)[-1], outputs(backbone, (), x)[-1], rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            changed.mul_(-3)
        trunk.refresh()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_pytorchs(device, layout) -> None:
    linear = FusedLinear(*nn.Linear(16, 8, device=device, dtype=torch.float16).parameters())
    x = torch.randn(2, 3, 16, device=device, dtype=torch.float16)
    linear.choose(x)
    nested = torch.nested.as_nested_tensor([*x], layout=layout)
    linear.choose(nested)
    assert not linear.in_triton
    linear.choose(x)
    found = torch.nested.to_padded_tensor(linear(nested), 0.0)
    torch.testing.assert_close(found, F.linear(x, linear.weight, linear.bias), rtol=1e-2, atol=1e-2)


def test_what_is_written_elsewhere_is_no_activation(device) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.fc = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.empty_like(x)
            F.gelu(self.a(x), out=z)
            return self.fc(z.mean(1))

    backbone, x = Writes().eval().to(device, torch.float16), torch.randn(2, 7, 8, device=device, dtype=torch.float16)
    assert_same(made(backbone, (), x), backbone, (), x)


@pytest.mark.parametrize("way", ["export", "strict", "jit", "make_fx", "fake", "dynamo"])
def test_who_traces_a_trunk_gets_what_holds_for_all(device, way: str) -> None:
    """Of any size, and without a launch of ours in the trace, but for sizes that are given."""
    backbone, x = mixing(device)
    module = made(backbone, (), x).module
    with torch.no_grad():
        expected, other = module(x), torch.randn(5, 7, 16, device=device, dtype=torch.float16)
        if way == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                assert module(mode.from_tensor(x)).shape == expected.shape
            return
        if way == "export":
            traced = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("b")},)).module()
        elif way == "strict":
            traced = torch.export.export(module, (x,), strict=True).module()
        elif way == "jit":
            traced = torch.jit.trace(module, (x,), check_trace=False)
        elif way == "make_fx":
            traced = make_fx(module)(x)
        else:
            torch._dynamo.reset()
            traced = torch.compile(module, backend="eager", fullgraph=True)
        torch.testing.assert_close(traced(x), expected, rtol=2e-2, atol=2e-2)
        if way in ("export", "dynamo"):
            torch.testing.assert_close(traced(other), module(other), rtol=2e-2, atol=2e-2)


class Quantised(torch.Tensor):
    """A weight of int8 with scales, which says that it is of their dtype."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor) -> "Quantised":
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scales.dtype, device=numbers.device)

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            weight = args[1].numbers.to(args[1].scales.dtype) * args[1].scales
            return F.linear(args[0], weight, *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return cls(args[0].numbers, args[0].scales)
        raise NotImplementedError(f"{func}")


def test_weights_of_a_kind_of_their_own_are_left(device) -> None:
    layers = nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.Flatten(), nn.Linear(48, 5)
    backbone = nn.Sequential(*layers).eval().to(device, torch.float16)
    weight = backbone[0].weight.detach()
    scales = weight.abs().amax(1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    backbone[0].weight = nn.Parameter(Quantised(numbers, scales), requires_grad=False)
    x = torch.randn(2, 3, 16, device=device, dtype=torch.float16)
    trunk = made(backbone, (), x)
    assert called(trunk.module)[nn.Linear] == 1 and note(1) in trunk.notes
    torch.testing.assert_close(trunk_outputs(trunk, (), x)[-1], outputs(backbone, (), x)[-1], rtol=1e-2, atol=1e-2)
