"""Sums, activations and changes in place that only look like those that a trunk fuses or moves."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.model import make_trunk
from support.trunk_cases import Net, assert_same, conv, convolutions, logits, made, with_odd_norms
from torch import Tensor, nn


def with_options(layer, **options):
    """A layer with attributes that its user has set."""
    for name, value in options.items():
        setattr(layer, name, value)
    return layer


def narrow_in_place(net, x):
    y = net.a(x.half())
    y += x
    return y.float()


def joined_then_viewed(net, x):
    return ((x * 2).contiguous() + net.a(x)).view(x.shape[0], -1).view(x.shape)


def relu_of_aten(net, x):
    y = x * 1.0
    return net.a(y) + torch.ops.aten.relu_.default(y)


UNUSUAL = [
    (lambda net, x: net.a(x) + x.size(0), {}),
    (lambda net, x: F.relu(net.a(x) + x.size(0)), {}),
    (joined_then_viewed, {}),
    (lambda net, x: F.silu(joined_then_viewed(net, x)), {}),
    (narrow_in_place, dict(a=nn.Conv2d(4, 4, 3, padding=1).half())),
    (lambda net, x: net.a(x).add_(x.double()), {}),
    (relu_of_aten, {}),
    (lambda net, x: torch.relu(input=net.a(x)), {}),
    (lambda net, x: net.clips(net.a(x)), dict(clips=with_options(nn.ReLU6(), max_val=0.5))),
    (lambda net, x: net.a(x) + x, dict(a=with_options(nn.Conv2d(4, 4, 3), padding=1, stride=1, dilation=[1, 1]))),
    (lambda net, x: (net.a(x) + net.b(x.double())).float(), dict(b=nn.Conv2d(4, 4, 3, padding=1).double())),
]


@torch.library.custom_op("auxhead_tests::clip_and_copy", mutates_args={"x"})
def clip_and_copy(x: Tensor, y: Tensor) -> Tensor:
    x.clamp_(min=0)
    return y.clone()


#: What changes the convolution's input behind it, but for inputs that are positive, or before it in one layout alone.
CHANGES = {
    "an operator that writes": lambda y: torch.ops.auxhead_tests.clip_and_copy(y, y * 2),
    "aten's relu_": torch.ops.aten.relu_.default,
    "reshape of aten": lambda y: torch.ops.aten.reshape.default(y, [2, -1]).relu_(),
    "swapdims": lambda y: y.flatten(1).swapdims(0, 1).relu_(),
    "expand_as": lambda y: y.flatten(1).expand_as(y.flatten(1)).relu_(),
    "hsplit": lambda y: F.relu(y.flatten(1).hsplit(2)[0], inplace=True),
    "float": lambda y: y.float(memory_format=torch.contiguous_format).relu_(),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_in_place_is_not_passed(change, first) -> None:
    def join(net, x):
        y = x * 1.0
        if first:
            change(y)
            return net.a(y)
        z = net.a(y)
        return F.relu(z + change(y).mean())

    backbone = with_odd_norms(Net(join))
    trunk = make_trunk(backbone, [], torch.rand(2, 4, 6, 6), "cudnn")
    x = torch.randn(2, 4, 6, 6)
    found = trunk.module(x.contiguous(memory_format=trunk.memory_format))
    found = found if trunk.classifier is None else trunk.classifier.logits(found)
    torch.testing.assert_close(found, backbone(x))


def test_refresh_writes_to_no_bias_of_the_users() -> None:
    """A convolution without one adds that of its summand, which may be another layer's as well."""
    backbone = with_odd_norms(Net(lambda net, x: net.norm_a(F.relu(net.b(x) + net.a(x)) * 1.0)))
    backbone.norm_a.bias = backbone.a.bias
    trunk = made(backbone, [], torch.randn(2, 4, 6, 6))
    before = backbone.norm_a.bias.clone()
    backbone.a.bias = nn.Parameter(torch.full((4,), 7.0))
    trunk.refresh()
    assert torch.equal(backbone.norm_a.bias, before)


@pytest.mark.parametrize("join, layers", UNUSUAL, ids=range(len(UNUSUAL)))
def test_unusual_sums_and_activations_are_what_they_are(join, layers) -> None:
    backbone = with_odd_norms(Net(join, **layers))
    x = torch.randn(2, 4, 6, 6)
    trunk = made(backbone, [], x)
    torch.testing.assert_close(logits(trunk, x), backbone(x))
    with torch.no_grad():
        for layer in backbone.modules():
            if isinstance(layer, nn.Conv2d) and layer.bias is not None:
                layer.bias.normal_()
    trunk.refresh()
    for each in (x, -x, torch.randn(3, 4, 6, 6)):
        torch.testing.assert_close(logits(trunk, each), backbone(each))


def test_a_convolution_without_bias_has_an_activation_too() -> None:
    backbone = with_odd_norms(Net(lambda net, x: F.relu(net.b(F.silu(net.a(x))) + x), a=conv(bias=False)))
    trunk = made(backbone, [], x := torch.randn(2, 4, 6, 6))
    assert [layer.following for layer in convolutions(trunk)] == ["silu", "relu"]
    assert_same(trunk, backbone, [], x)


def test_refresh_writes_to_nothing_of_the_users() -> None:
    first, second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    second.weight = first.weight
    backbone = with_odd_norms(Net(lambda net, x: net.norm_a(net.a(net.two(net.one(x)))), one=first, two=second))
    trunk = made(backbone, [], torch.randn(2, 4, 6, 6))
    before = second.weight.clone()
    first.weight = nn.Parameter(torch.randn(4, 4, 1, 1))
    trunk.refresh()
    assert torch.equal(second.weight, before)
