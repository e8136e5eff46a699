"""Layers of a backbone that a trunk folds, fuses and replaces, and those that it leaves alone."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import max_pool2d, runs_triton
from auxhead.model import Trunk, make_trunk
from auxhead.model.trunk.fused_convolution import FusedConvolution, _fused_operator
from support.example_models import SmallNet
from support.trunk_cases import (
    Net,
    assert_same,
    called,
    conv,
    convolutions,
    logits,
    made,
    torchvision_model,
    trunk_outputs,
    with_odd_norms,
)
from torch import Tensor, nn


def in_place_sum(net, x):
    y = net.first(x)
    y += x
    return F.relu(y)


def broadcast(net, x):
    return F.relu(net.first(x) + x.mean((2, 3), keepdim=True))


#: How two convolutions are joined; then how many convolutions get a ReLU, and how many of those a sum.
JOINS = [
    (lambda net, x: F.relu(net.first(x)), 1, 0),
    (lambda net, x: torch.relu(net.first(x)), 1, 0),
    (lambda net, x: net.first(x).relu(), 1, 0),
    (lambda net, x: net.first(x).relu_(), 1, 0),
    (lambda net, x: F.relu(net.first(x), inplace=True), 1, 0),
    (lambda net, x: net.relu_in_place(net.first(x)), 1, 0),
    (lambda net, x: net.relu(net.a(x)), 1, 0),
    (lambda net, x: net.relu(net.first(x) + x), 1, 1),
    (lambda net, x: net.relu(x + net.first(x)), 1, 1),
    (lambda net, x: torch.add(x, net.first(x)).relu(), 1, 1),
    (lambda net, x: net.first(x).add(x).relu(), 1, 1),
    (lambda net, x: net.first(x).add_(x).relu_(), 1, 1),
    (lambda net, x: net.relu(net.first(x) + net.second(x)), 1, 1),
    (lambda net, x: net.relu(net.second(x) + net.first(x)), 1, 1),
    (lambda net, x: net.relu(net.second(F.relu(net.first(x))) + x), 2, 1),
    (lambda net, x: F.hardswish(net.first(x)) + F.relu6(net.second(x)), 0, 0),
    (lambda net, x: net.relu(net.first(x) + 1.0), 0, 0),
    (lambda net, x: net.relu(net.first(x) * x), 0, 0),
    (lambda net, x: net.relu(net.norm_a(net.relu(x))), 0, 0),
    (in_place_sum, 1, 1),
    (lambda net, x: F.relu((net.second(x) * 1.5).add_(net.first(x))), 0, 0),
    (lambda net, x: F.relu((z := x * 1.5).add_(net.first(x))) + z, 0, 0),
    (lambda net, x: F.relu(net.first(y := x * 1.0) + net.relu_in_place(y)), 0, 0),
    (lambda net, x: F.relu(y := net.first(x)) + y, 0, 0),
    (lambda net, x: F.relu(y := net.first(x) + x) + y, 0, 1),
    (lambda net, x: net.first(x) + x, 0, 1),
    (lambda net, x: F.silu(x + net.first(x)), 0, 1),
    (lambda net, x: net.first(x) + x + net.second(x) + x, 0, 2),
    (lambda net, x: net.second(net.first(x) + net.norm_a(net.a(x))) + x, 0, 2),
    (lambda net, x: F.relu(net.norm_a(y := net.a(x))) + y, 0, 0),
    (lambda net, x: F.relu((y := net.first(x)) + y), 0, 0),
    (lambda net, x: F.relu(net.first(x)) + F.relu(net.norm_b(net.a(x))), 2, 0),
    (lambda net, x: F.relu(torch.add(net.first(x), x, alpha=2)), 0, 0),
    (broadcast, 1, 1),
    (lambda net, x: F.relu(net.first(x)[:, :1].expand(-1, 4, -1, -1) + net.second(x)), 1, 1),
]


@pytest.mark.parametrize("join, relus, sums", JOINS, ids=lambda v: v.__name__ if callable(v) else str(v))
def test_what_is_fused_and_what_is_not(device, join, relus, sums) -> None:
    backbone = with_odd_norms(Net(join)).to(device)
    x = torch.randn(2, 4, 6, 6, device=device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        trunk = made(backbone, [], x)
        assert_same(trunk, backbone, [], x)
    assert sum(conv.following == "relu" for conv in convolutions(trunk)) == relus
    nodes = [node for node in trunk.module.graph.nodes if node.op == "call_module" and len(node.args) == 2]
    assert len(nodes) == sums
    assert trunk.classifier is not None and trunk.classifier.pool == "avg"


def test_nothing_is_fused_across_a_tap() -> None:
    backbone = with_odd_norms(Net(lambda net, x: net.relu(net.norm_a(net.a(x)) + x)))
    x = torch.randn(2, 4, 6, 6)
    for taps, folds, relus in (([], 1, 1), (["a"], 0, 0), (["norm_a"], 1, 0), (["relu"], 1, 1), (["a", "relu"], 0, 0)):
        trunk = made(backbone, taps, x)
        assert_same(trunk, backbone, taps, x)
        assert sum(conv.folds_norm for conv in convolutions(trunk)) == folds, taps
        assert sum(conv.following == "relu" for conv in convolutions(trunk)) == relus, taps


@pytest.mark.parametrize(
    ("options", "affine"),
    [(dict(padding="same"), True), (dict(padding=1, groups=2), False), (dict(padding=2, dilation=2), True),
     (dict(padding=1, stride=2), False), (dict(padding=1, groups=4), True), (dict(padding=1, bias=False), False),
     (dict(padding=1, bias=False), True)],
    ids=str,
)  # fmt: skip
def test_convolutions_of_any_kind(device, options, affine) -> None:
    norm = nn.BatchNorm2d(4, affine=affine, eps=0.1)
    backbone = nn.Sequential(nn.Conv2d(4, 4, 3, **options), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                             nn.Linear(4, 3))  # fmt: skip
    backbone = with_odd_norms(backbone).to(device)
    x = torch.randn(2, 4, 8, 8, device=device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        trunk = made(backbone, ["2"], x)
        assert_same(trunk, backbone, ["2"], x)
    assert convolutions(trunk)[0].following == "relu" and convolutions(trunk)[0].folds_norm


def test_other_paddings_stay_convolutions() -> None:
    backbone = with_odd_norms(nn.Sequential(conv(padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                                            nn.Linear(64, 3)))  # fmt: skip
    trunk = made(backbone, [], torch.randn(2, 4, 4, 4))
    assert_same(trunk, backbone, [], torch.randn(2, 4, 4, 4))
    assert not convolutions(trunk) and called(trunk.module)[nn.Conv2d] == 1
    assert trunk.classifier.pool == "none"


TAILS = {
    "modules": (lambda net, y: net.fc(net.flat(net.drop(net.pool(y)))), "avg"),
    "torch.flatten": (lambda net, y: net.fc(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1)), "avg"),
    "flatten(1)": (lambda net, y: net.fc(F.adaptive_avg_pool2d(y, (1, 1)).flatten(1)), "avg"),
    "view(size())": (lambda net, y: net.fc((p := net.pool(y)).view(p.size()[0], -1)), "avg"),
    "view(size)": (lambda net, y: net.fc((p := net.pool(y)).view(p.size(0), -1)), "avg"),
    "reshape(shape)": (lambda net, y: net.fc((p := net.pool(y)).reshape(p.shape[0], -1)), "avg"),
    "mean": (lambda net, y: net.fc(y.mean((2, 3))), "avg"),
    "torch.mean": (lambda net, y: net.fc(torch.mean(y, dim=[-1, -2])), "avg"),
    "mean, keepdim": (lambda net, y: net.fc(y.mean((2, 3), keepdim=True).flatten(1)), "avg"),
    "max": (lambda net, y: net.fc(F.adaptive_max_pool2d(y, 1).flatten(1)), "max"),
    "vector": (lambda net, y: net.fc(y.amax((2, 3))), "none"),
    "dropout": (lambda net, y: net.fc(F.dropout(y.amax((2, 3)), training=net.training)), "none"),
    "softmax": (lambda net, y: net.fc(y.mean((2, 3))).softmax(1), None),
    "used twice": (lambda net, y: net.fc(p := y.mean((2, 3))) + p[:, :3], None),
}


@pytest.mark.parametrize("tail", TAILS)
def test_classifiers(tail) -> None:
    forward, pool = TAILS[tail]

    class Tailed(Net):
        def forward(self, x):
            return forward(self, F.relu(self.first(x)))

    layers = dict(pool=nn.AdaptiveAvgPool2d(1), drop=nn.Dropout(), flat=nn.Flatten())
    backbone = with_odd_norms(Tailed(None, **layers))
    x = torch.randn(3, 4, 5, 5)
    trunk = made(backbone, [], x)
    assert_same(trunk, backbone, [], x)
    assert (trunk.classifier.pool if trunk.classifier else None) == pool
    if pool is None:
        assert any("classifier stays" in note for note in trunk.notes)
    else:
        assert not set(called(trunk.module)) & {nn.Linear, nn.Flatten, nn.AdaptiveAvgPool2d, "mean", "view", "size"}


def test_a_grid_before_the_classifier() -> None:
    backbone = with_odd_norms(nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d((2, 3)),
                                            nn.Flatten(), nn.Linear(24, 3)))  # fmt: skip
    x = torch.randn(2, 4, 7, 7)
    trunk = made(backbone, ["2"], x)
    assert_same(trunk, backbone, ["2"], x)
    assert trunk.classifier.pool_size == (2, 3)
    tapped = made(backbone, ["3"], x)  # the pool is a tap, and stays
    assert_same(tapped, backbone, ["3"], x)
    assert tapped.classifier.pool == "none"


def test_max_pools_that_stay() -> None:
    pools = [
        nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True),  # nothing is left over
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, stride=1, dilation=2),
    ]
    backbone = nn.Sequential(conv(), *pools, nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(2, 4, 17, 17)
    backbone(x)
    trunk = made(backbone.eval(), [], x)
    assert_same(trunk, backbone, [], x)
    assert called(trunk.module) == {FusedConvolution: 1, max_pool2d: 1, nn.MaxPool2d: 2}


class Functional(Net):
    def forward(self, x):
        y = F.max_pool2d(F.relu(self.first(x)), 3, stride=2, padding=1)
        return self.fc(F.max_pool2d(torch.max_pool2d(y, 2), 1).mean((2, 3)))


def test_max_pools_as_functions() -> None:
    backbone = with_odd_norms(Functional(None))
    x = torch.randn(2, 4, 16, 16)
    trunk = made(backbone, [], x)
    assert_same(trunk, backbone, [], x)
    assert called(trunk.module) == {FusedConvolution: 1, max_pool2d: 3}


def test_refresh_folds_again_in_place(device) -> None:
    backbone = with_odd_norms(SmallNet()).to(device)
    x = torch.randn(2, 3, 12, 12, device=device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        trunk = made(backbone, ["block1"], x)
        pointers = [(conv.weight.data_ptr(), conv.bias.data_ptr()) for conv in convolutions(trunk)]
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
        with_odd_norms(backbone)
        stale = trunk_outputs(trunk, ["block1"], x)
        with torch.inference_mode():
            trunk.refresh()
        assert [(conv.weight.data_ptr(), conv.bias.data_ptr()) for conv in convolutions(trunk)] == pointers
        assert_same(trunk, backbone, ["block1"], x)
        assert not any(map(torch.equal, stale, trunk_outputs(trunk, ["block1"], x)))


def test_what_needs_no_folding_is_shared() -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    x = torch.randn(2, 3, 5, 5)
    trunk = made(backbone.eval(), [], x)
    assert convolutions(trunk)[0].weight is backbone[0].weight
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(1.0)
    assert_same(trunk, backbone, [], x)


# cuDNN's fused convolutions, played by plain ones


def convolve_relu(x, weight, bias, stride, padding, dilation, groups):
    return F.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups))


def convolve_add_relu(x, weight, z, alpha, bias, stride, padding, dilation, groups):
    assert z.shape[1] == weight.shape[0]
    return F.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups) + alpha * z)


def refuses(*_arguments):
    raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED\nand more")


@pytest.fixture
def cudnn(monkeypatch):
    """Let convolutions on the CPU believe in cuDNN, whose operators the test gives."""

    def play(relu, add_relu):
        monkeypatch.setattr("auxhead.model.trunk.fused_convolution.has_cudnn", lambda x: True)
        monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
        monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)

    return play


def test_cudnn_s_operators_get_the_right_arguments(cudnn) -> None:
    cudnn(convolve_relu, convolve_add_relu)
    backbone = torchvision_model("resnet18")
    x = torch.randn(2, 3, 32, 32)
    trunk = made(backbone, ["layer2.0"], x)
    assert [conv.fused for conv in convolutions(trunk)] == [conv.following == "relu" for conv in convolutions(trunk)]
    assert trunk.notes[1:] == ("Convolutions that run with their ReLU as one launch of cuDNN: 17.",)
    assert_same(trunk, backbone, ["layer2.0"], x)


@pytest.mark.skipif(not runs_triton(torch.empty(1)), reason="needs Triton's interpreter")
def test_a_convolution_in_triton_is_counted_once(cudnn, monkeypatch) -> None:
    cudnn(convolve_relu, convolve_add_relu)
    backbone = with_odd_norms(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))).half()
    x = torch.randn(2, 8, 6, 6, dtype=torch.float16)
    for sooner, said in ((True, "what follows as one launch of Triton"), (False, "their ReLU as one launch of cuDNN")):
        monkeypatch.setattr("auxhead.model.trunk.timed_convolutions._is_sooner", {})
        monkeypatch.setattr("auxhead.model.trunk.timed_convolutions.takes_no_longer", lambda *_, which=sooner: which)
        notes = [note for note in made(backbone, [], x).notes if "as one launch" in note]
        assert len(notes) == 1 and notes[0].endswith(f"{said}: 1.")


@pytest.mark.parametrize(
    "add_relu, why",
    [(refuses, "cuDNN: CUDNN_STATUS_NOT_SUPPORTED"),
     (lambda *a: convolve_add_relu(*a) + 1e3, "cuDNN's fused convolution is off by 1e+03"),
     (lambda *a: convolve_add_relu(*a) * float("nan"), "cuDNN's fused convolution is off by nan")],
    ids=["refuses", "is wrong", "gives NaN"],
)  # fmt: skip
def test_what_cudnn_does_not_do_right_runs_plain(cudnn, add_relu, why) -> None:
    cudnn(convolve_relu, add_relu)
    backbone = with_odd_norms(Net(lambda net, x: net.relu(net.second(F.relu(net.first(x))) + x)))
    x = torch.randn(2, 4, 6, 6)
    trunk = made(backbone, [], x)
    assert sum(conv.fused for conv in convolutions(trunk)) == 1
    assert trunk.notes[2] == f"Convolutions whose ReLU runs by itself: 1, since {why}."
    assert_same(trunk, backbone, [], x)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=str)
def test_what_compilers_are_told_of_cudnn_s_output_holds(cudnn, memory_format) -> None:
    cudnn(convolve_relu, convolve_add_relu)
    x = torch.randn(2, 4, 6, 6).contiguous(memory_format=memory_format)
    given = x, torch.randn(4, 4, 3, 3), None, None, [1, 1], [1, 1], [1, 1], 1
    torch.library.opcheck(_fused_operator, given, test_utils="test_faketensor")
    assert _fused_operator(*given).is_contiguous(memory_format=torch.channels_last)


def test_convolutions_that_cudnn_is_not_asked_for(cudnn) -> None:
    cudnn(convolve_relu, convolve_add_relu)
    for join, why in ((broadcast, "the summand [2, 4, 1, 1] of"), (lambda net, x: F.relu(net.wide(x)), "depthwise"),
                      (lambda net, x: F.relu(net.same(x)), "padding='same'")):  # fmt: skip
        layers = dict(wide=nn.Conv2d(4, 4, 8, padding=4, groups=4), same=nn.Conv2d(4, 4, 3, padding="same"))
        backbone = with_odd_norms(Net(join, **layers))
        x = torch.randn(2, 4, 6, 6)
        trunk = made(backbone, [], x)
        assert not any(conv.fused for conv in convolutions(trunk)) and why in trunk.notes[1]
        assert_same(trunk, backbone, [], x)


def test_cudnn_s_operators_take_these_arguments() -> None:
    """As far as that shows without a GPU: they are refused for their device, not for what they are."""
    trunk = made(torchvision_model("resnet18"), [], x := torch.randn(1, 3, 32, 32))
    for name, inputs in (("conv1_fused", 1), ("layer1_0_conv2_fused", 2)):
        conv = trunk.module.get_submodule(name)
        conv.fused = True
        with pytest.raises(NotImplementedError, match="cudnn_convolution_.*CPU"):
            conv(*[x if inputs == 1 else torch.randn(1, 64, 8, 8)] * inputs)


# Batch norms of timm


class NormAct(nn.BatchNorm2d):
    """A batch norm with the ReLU behind it, as timm has them."""

    def __init__(self, channels: int, changed: str = "") -> None:
        super().__init__(channels)
        self.changed = changed
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        weight, bias = (self.bias, self.weight) if self.changed == "swapped" else (self.weight, self.bias)
        eps = 0.5 if self.changed == "eps" else self.eps
        mean = self.running_mean * 2 if self.changed == "mean" else self.running_mean
        trains = self.training or self.changed == "training"
        return self.act(self.drop(F.batch_norm(x, mean, self.running_var, weight, bias, trains, 0.1, eps)))


def with_norm_act(changed: str) -> tuple[nn.Module, Trunk, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), NormAct(8, changed), nn.Conv2d(8, 8, 1), NormAct(8, changed)]
    backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    for norm in (backbone[1], backbone[3]):
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    x = torch.randn(2, 3, 9, 9)
    return backbone, make_trunk(backbone, ("0",), x, "cudnn"), x


def test_batch_norms_that_are_functions_within_a_layer_are_folded() -> None:
    backbone, trunk, x = with_norm_act("")
    fused = convolutions(trunk)
    assert len(fused) == 2 and [one.folds_norm for one in fused] == [False, True], "the first is tapped before its norm"
    assert fused[1].following == "relu" and "1 batch norm " in " ".join(trunk.notes)
    torch.testing.assert_close(logits(trunk, x), backbone(x))
    with torch.no_grad():
        backbone[3].running_mean.add_(0.3)
    trunk.refresh()
    torch.testing.assert_close(logits(trunk, x), backbone(x))


@pytest.mark.parametrize("changed", ["swapped", "eps", "mean"])
def test_what_is_not_a_layers_own_batch_norm_is_not_folded(changed: str) -> None:
    backbone, trunk, x = with_norm_act(changed)
    assert not any(one.folds_norm for one in convolutions(trunk))
    torch.testing.assert_close(logits(trunk, x), backbone(x))


@pytest.mark.parametrize("name", ["mobilenetv4_conv_small", "efficientnet_lite0", "resnet10t"])
def test_networks_of_timm(name: str) -> None:
    backbone = pytest.importorskip("timm").create_model(name, num_classes=7).eval()
    with_odd_norms(backbone)
    x = torch.randn(2, 3, 64, 64)
    trunk = make_trunk(backbone, (), x, "cudnn")
    norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in backbone.modules())
    assert f"{norms} batch norms" in " ".join(trunk.notes), trunk.notes
    torch.testing.assert_close(logits(trunk, x), backbone(x), atol=1e-4, rtol=1e-4)
