"""Trunks say what the backbone says, at every tap and in the end, and leave the backbone as it was."""

import copy
import shutil
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import torchvision
from auxhead.kernels import max_pool2d
from auxhead.model.fused_aux_head import FusedAuxHead
from auxhead.model.fused_convolution import FusedConvolution
from auxhead.model.taps import ForwardLeft, listening
from auxhead.model.trunk import TRUNKS, make_trunk
from example_models import SmallNet
from torch import Tensor, nn

LAST = torch.channels_last
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and not torch.cuda.is_available(), reason="needs a C++ compiler"
)


def with_odd_norms(model: nn.Module) -> nn.Module:
    """In eval mode, with batch norms that do something."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model.eval()


@torch.no_grad()
def outputs(module: nn.Module, taps, x: Tensor, classifier: FusedAuxHead | None = None) -> list[Tensor]:
    """What the taps return, in the order in which their hooks fire, and the logits."""
    seen = []
    with listening(module, taps, lambda place, y: seen.append((place, y.clone()))):
        y = module(x)
    assert [place for place, _ in seen] == list(range(len(taps)))
    return [y for _, y in seen] + [y if classifier is None else classifier.logits(y)]


def trunk_outputs(trunk, taps, x) -> list[Tensor]:
    return outputs(trunk.module, taps, x.contiguous(memory_format=trunk.memory_format), trunk.classifier)


def assert_same(trunk, backbone, taps, x) -> None:
    roundings = 512 if x.is_cuda else 64  # cuDNN may choose algorithms that round more often
    exact = outputs(copy.deepcopy(backbone).double(), taps, x.double())
    for mine, truth in zip(trunk_outputs(trunk, taps, x), exact, strict=True):
        assert mine.shape == truth.shape and mine.dtype == x.dtype
        error = (mine.double() - truth).abs().max() / truth.abs().max()
        assert error <= roundings * torch.finfo(x.dtype).eps


def made(backbone, taps, x, kind="cudnn"):
    """A trunk that really was made."""
    trunk = make_trunk(backbone, taps, x, kind)
    assert trunk.module is not backbone, trunk.notes
    return trunk


def convolutions(trunk) -> list[FusedConvolution]:
    return [module for module in trunk.module.modules() if isinstance(module, FusedConvolution)]


def called(module: torch.fx.GraphModule) -> Counter:
    """What a graph calls: types of layers, functions, names of methods."""
    count: Counter = Counter()
    for node in module.graph.nodes:
        if node.op == "call_module":
            count[type(module.get_submodule(node.target))] += 1
        elif node.op in ("call_function", "call_method"):
            count[node.target] += 1
    return count


def fingerprint(module: nn.Module):
    tensors = {
        name: (id(t), t.clone(), t.data_ptr(), t.stride()) for name, t in module.state_dict(keep_vars=True).items()
    }
    layers = {name: (id(m), type(m), m.training, set(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
              for name, m in module.named_modules(remove_duplicate=False)}  # fmt: skip
    return tensors, layers


def assert_untouched(module: nn.Module, before) -> None:
    tensors, layers = fingerprint(module)
    assert layers == before[1]
    assert tensors.keys() == before[0].keys()
    for name, (identity, value, pointer, stride) in tensors.items():
        then = before[0][name]
        assert (identity, pointer, stride) == (then[0], then[2], then[3]) and torch.equal(value, then[1]), name


RESNET18_BLOCKS = [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
MODELS = {
    "resnet18, every block": ("resnet18", RESNET18_BLOCKS),
    "resnet18, stages and blocks": ("resnet18", ["layer1.0", "layer1.1", "layer1", "layer2", "layer4"]),
    "resnet18, leaves": ("resnet18", ["conv1", "layer1.0.bn1", "layer2.0.downsample", "avgpool", "fc"]),
    "resnet18, no taps": ("resnet18", []),
    "resnet50": ("resnet50", ["layer1.0", "layer3"]),
    "mobilenet": ("mobilenet_v3_small", ["features.0", "features.3", "features.8"]),
    "googlenet": ("googlenet", ["inception3a", "inception4c.branch2", "inception5b"]),
    "densenet": ("densenet121", ["features.denseblock1", "features.transition1"]),
    "vgg": ("vgg11_bn", ["0.0", "0.1", "0.3", "0.13"]),
}


def torchvision_model(name: str) -> nn.Module:
    options = {"init_weights": False} if name == "googlenet" else {}
    if name == "vgg11_bn":  # without its two large Linears
        features = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["A"], batch_norm=True)
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 7)]
        return with_odd_norms(nn.Sequential(features, *head))
    return with_odd_norms(getattr(torchvision.models, name)(weights=None, num_classes=7, **options))


@pytest.mark.parametrize("case", MODELS)
def test_torchvision_models(device, case) -> None:
    name, taps = MODELS[case]
    backbone = torchvision_model(name).to(device)
    size = 32 if "vgg" in name or device.type == "cpu" else 64  # the interpreter takes long over max-pools
    x = torch.randn(2, 3, size, size, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        before = fingerprint(backbone)
        says = outputs(backbone, taps, x)
        trunk = made(backbone, taps, x)
        assert_untouched(backbone, before)
        assert all(map(torch.equal, says, outputs(backbone, taps, x)))
        other = torch.randn(3, 3, size, size, device=device)  # another batch, which is not the example
        assert_same(trunk, backbone, taps, other)
    assert trunk.memory_format is LAST
    assert convolutions(trunk) and all(conv.weight.is_contiguous(memory_format=LAST) for conv in convolutions(trunk))


def test_all_that_a_resnet_s_graph_still_calls() -> None:
    backbone = torchvision_model("resnet18")
    trunk = made(backbone, RESNET18_BLOCKS, torch.randn(2, 3, 32, 32))
    assert called(trunk.module) == {FusedConvolution: 20, nn.Identity: 8, max_pool2d: 1}
    relu = [conv for conv in convolutions(trunk) if conv.relu]
    plain = [conv for conv in convolutions(trunk) if not conv.relu]
    assert len(relu) == 17 and len(plain) == 3 and all(conv.folds_norm for conv in convolutions(trunk))
    assert all(conv.gives_bias for conv in plain)  # the shortcuts; their bias comes with the sum
    assert trunk.classifier.pool == "avg" and trunk.classifier.num_classes == 7
    assert trunk.classifier.linear.weight is backbone.fc.weight and trunk.classifier.linear.bias is backbone.fc.bias
    answer = trunk.classifier(trunk.module(torch.randn(2, 3, 32, 32).contiguous(memory_format=LAST)))
    assert answer.label.shape == (2,) and not answer.exit.any()
    assert trunk.notes[0] == (
        "Folded or fused into convolutions: 20 batch norms and 8 sums; 1 max-pool replaced by a Triton kernel."
    )
    assert len(trunk.notes) == 2 and "17, since cuDNN's fused convolutions need" in trunk.notes[1]


def test_the_hooks_of_a_trunk_see_the_very_tensor_that_goes_on() -> None:
    trunk = made(torchvision_model("resnet18"), ["layer4.1"], torch.randn(1, 3, 32, 32))
    seen = []
    with listening(trunk.module, ["layer4.1"], lambda _place, y: seen.append(y)):
        features = trunk.module(torch.randn(1, 3, 32, 32))
    assert features is seen[0]


def test_a_forward_can_be_left_at_a_tap() -> None:
    backbone = torchvision_model("resnet18")
    trunk = made(backbone, ["layer1", "layer2"], torch.randn(1, 3, 32, 32))
    seen = []

    def leave(_place, y):
        seen.append(y)
        raise ForwardLeft

    with pytest.raises(ForwardLeft), listening(trunk.module, ["layer1", "layer2"], leave):
        trunk.module(torch.randn(1, 3, 32, 32))
    assert len(seen) == 1


def test_made_in_inference_mode_it_still_works_outside() -> None:
    backbone = with_odd_norms(SmallNet())
    with torch.inference_mode():
        x = torch.randn(2, 3, 12, 12)
        trunk = made(backbone, SmallNet.taps, x)
    trunk.refresh()
    assert_same(trunk, backbone, SmallNet.taps, torch.randn(2, 3, 12, 12))


def conv(channels=4, width=4, **options) -> nn.Conv2d:
    return nn.Conv2d(channels, width, 3, padding=1, **options)


class Net(nn.Module):
    """Two convolutions with batch norms, joined by ``join``, on 4 channels; then pool and linear."""

    def __init__(self, join, **layers: nn.Module) -> None:
        super().__init__()
        self.a, self.norm_a, self.b, self.norm_b = conv(), nn.BatchNorm2d(4), conv(bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.relu_in_place = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 3)
        self.join = join
        for name, layer in layers.items():
            self.add_module(name, layer)

    def first(self, x: Tensor) -> Tensor:
        return self.norm_a(self.a(x))

    def second(self, x: Tensor) -> Tensor:
        return self.norm_b(self.b(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.join(self, x).mean((2, 3)))


def in_place_sum(net, x):
    y = net.first(x)
    y += x
    return F.relu(y)


def other_in_place_sum(net, x):
    z = net.second(x) * 1.5
    z.add_(net.first(x))
    return F.relu(z)


def in_place_sum_in_a_summand_used_again(net, x):
    z = x * 1.5
    return F.relu(z.add_(net.first(x))) + z


def sum_behind_a_change_of_x(net, x):
    x = x * 1.0
    y = net.first(x)
    z = net.relu_in_place(x)
    return F.relu(y + z)


def two_users(net, x):
    y = net.first(x)
    return F.relu(y) + y


def sum_with_two_users(net, x):
    y = net.first(x) + x
    return F.relu(y) + y


def norm_with_two_users(net, x):
    y = net.a(x)
    return F.relu(net.norm_a(y)) + y


def same_twice(net, x):
    y = net.first(x)
    return F.relu(y + y)


def one_convolution_twice(net, x):
    return F.relu(net.first(x)) + F.relu(net.norm_b(net.a(x)))


def with_alpha(net, x):
    return F.relu(torch.add(net.first(x), x, alpha=2))


def broadcast(net, x):
    return F.relu(net.first(x) + x.mean((2, 3), keepdim=True))


def wider(net, x):
    return F.relu(net.first(x)[:, :1].expand(-1, 4, -1, -1) + net.second(x))


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
    (other_in_place_sum, 0, 0),
    (in_place_sum_in_a_summand_used_again, 0, 0),
    (sum_behind_a_change_of_x, 0, 0),
    (two_users, 0, 0),
    (sum_with_two_users, 0, 0),
    (norm_with_two_users, 0, 0),
    (same_twice, 0, 0),
    (one_convolution_twice, 2, 0),
    (with_alpha, 0, 0),
    (broadcast, 1, 1),
    (wider, 1, 1),
]


@pytest.mark.parametrize("join, relus, sums", JOINS, ids=lambda v: v.__name__ if callable(v) else str(v))
def test_what_is_fused_and_what_is_not(device, join, relus, sums) -> None:
    backbone = with_odd_norms(Net(join)).to(device)
    x = torch.randn(2, 4, 6, 6, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        trunk = made(backbone, [], x)
        assert_same(trunk, backbone, [], x)
    assert sum(conv.relu for conv in convolutions(trunk)) == relus
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
        assert sum(conv.relu for conv in convolutions(trunk)) == relus, taps


@pytest.mark.parametrize(
    "options",
    [dict(padding="same"), dict(padding=1, groups=2), dict(padding=2, dilation=2), dict(padding=1, stride=2),
     dict(padding=1, groups=4), dict(padding=1, bias=False)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "bare"])
def test_convolutions_of_any_kind(device, options, affine) -> None:
    norm = nn.BatchNorm2d(4, affine=affine, eps=0.1)
    backbone = nn.Sequential(nn.Conv2d(4, 4, 3, **options), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                             nn.Linear(4, 3))  # fmt: skip
    backbone = with_odd_norms(backbone).to(device)
    x = torch.randn(2, 4, 8, 8, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        trunk = made(backbone, ["2"], x)
        assert_same(trunk, backbone, ["2"], x)
    assert convolutions(trunk)[0].relu and convolutions(trunk)[0].folds_norm


def test_other_paddings_stay_convolutions() -> None:
    backbone = with_odd_norms(nn.Sequential(conv(padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                                            nn.Linear(64, 3)))  # fmt: skip
    trunk = made(backbone, [], torch.randn(2, 4, 4, 4))
    assert_same(trunk, backbone, [], torch.randn(2, 4, 4, 4))
    assert called(trunk.module) == {nn.Conv2d: 1, nn.BatchNorm2d: 1, nn.ReLU: 1}
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
    pools = [nn.MaxPool2d(2), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, stride=1, dilation=2)]
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
    backbone = torchvision_model("resnet18").to(device)
    x = torch.randn(2, 3, 32, 32, device=device)
    with torch.backends.cudnn.flags(allow_tf32=False):
        trunk = made(backbone, ["layer1"], x)
        pointers = [(conv.weight.data_ptr(), conv.bias.data_ptr()) for conv in convolutions(trunk)]
        with torch.no_grad():
            for parameter in backbone.parameters():
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
        with_odd_norms(backbone)
        stale = trunk_outputs(trunk, ["layer1"], x)
        with torch.inference_mode():
            trunk.refresh()
        assert [(conv.weight.data_ptr(), conv.bias.data_ptr()) for conv in convolutions(trunk)] == pointers
        assert_same(trunk, backbone, ["layer1"], x)
        assert not any(map(torch.equal, stale, trunk_outputs(trunk, ["layer1"], x)))


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
        monkeypatch.setattr("auxhead.model.fused_convolution.has_cudnn", lambda x: True)
        monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
        monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)

    return play


def test_cudnn_s_operators_get_the_right_arguments(cudnn) -> None:
    cudnn(convolve_relu, convolve_add_relu)
    backbone = torchvision_model("resnet18")
    x = torch.randn(2, 3, 32, 32)
    trunk = made(backbone, ["layer2.0"], x)
    assert [conv.fused for conv in convolutions(trunk)] == [conv.relu for conv in convolutions(trunk)]
    assert trunk.notes[1:] == ("Convolutions that run with their ReLU as one launch of cuDNN: 17.",)
    assert_same(trunk, backbone, ["layer2.0"], x)


@pytest.mark.parametrize(
    "add_relu, why",
    [(refuses, "cuDNN: CUDNN_STATUS_NOT_SUPPORTED"),
     (lambda *a: convolve_add_relu(*a) + 1e3, "cuDNN's fused convolution is off by 1e+03"),
     (lambda *a: convolve_add_relu(*a) * float("nan"), "cuDNN's fused convolution is off by nan")],
    ids=["refuses", "is wrong", "gives NaN"],
)  # fmt: skip
def test_what_cudnn_does_not_do_right_runs_plain(cudnn, add_relu, why) -> None:
    cudnn(convolve_relu, add_relu)
    backbone = torchvision_model("resnet18")
    x = torch.randn(2, 3, 32, 32)
    trunk = made(backbone, [], x)
    assert sum(conv.fused for conv in convolutions(trunk)) == 9
    assert trunk.notes[2] == f"Convolutions whose ReLU runs by itself: 8, since {why}."
    assert_same(trunk, backbone, [], x)


def test_convolutions_that_cudnn_is_not_asked_for(cudnn) -> None:
    cudnn(convolve_relu, convolve_add_relu)
    for join, why in ((broadcast, "the summand [2, 4, 1, 1] of"), (lambda net, x: F.relu(net.wide(x)), "depthwise"),
                      (lambda net, x: F.relu(net.same(x)), "padding='same'")):  # fmt: skip
        layers = dict(wide=nn.Conv2d(4, 4, 3, groups=4), same=nn.Conv2d(4, 4, 3, padding="same"))
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


# What cannot be traced or folded


class Branching(nn.Module):
    """Traceable but for an ``if`` on the data."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(channels, 4), nn.BatchNorm2d(4), nn.ReLU())
        self.layers = nn.ModuleList([nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(2)])

    def forward(self, x):
        y = self.body(x)
        for layer in self.layers:
            y = layer(y)
        return y * 2 if y.mean() > 0 else y


def branching_inside() -> nn.Module:
    blocks = [nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU()), Branching(4)]
    return with_odd_norms(nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)))


class BranchingRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = branching_inside()

    def forward(self, x):
        return self.net(x) if x.shape[0] > 0 and x.sum() < 1e9 else None


@pytest.mark.parametrize("taps", [[], ["0", "1"], ["1.body", "1.layers.0", "1.layers.1", "1"], ["1.body.1"]], ids=str)
@pytest.mark.parametrize("at_root", [False, True], ids=["inside", "root"])
def test_a_branch_in_python_stays_with_everything_round_it_rewritten(at_root, taps) -> None:
    backbone = BranchingRoot().eval() if at_root else branching_inside()
    taps = [f"net.{tap}" for tap in taps] if at_root else taps
    x = torch.randn(2, 3, 8, 8)
    before = fingerprint(backbone)
    trunk = made(backbone, taps, x)
    assert_untouched(backbone, before)
    for sign in (1, -1):
        assert_same(trunk, backbone, taps, sign * x)
    assert len(convolutions(trunk)) == 4 and all(conv.folds_norm for conv in convolutions(trunk))
    assert sum(conv.relu for conv in convolutions(trunk)) == (3 if taps and "1.body.1" in taps[0] else 4)
    assert any("Branching" in note and "control flow" in note for note in trunk.notes)
    assert (trunk.classifier is None) == at_root
    assert any("The forward of the backbone" in note for note in trunk.notes) == at_root


@pytest.mark.parametrize("what", ["training", "statistics"])
def test_norms_without_usable_statistics_are_not_folded(what) -> None:
    backbone = with_odd_norms(Net(lambda net, x: F.relu(net.first(x)) + F.relu(net.second(x))))
    if what == "training":
        backbone.norm_b.train()
    else:
        backbone.norm_b = nn.BatchNorm2d(4, track_running_stats=False).eval()
    before = fingerprint(backbone)
    x = torch.randn(2, 4, 6, 6)
    trunk = made(backbone, [], x)
    assert_untouched(backbone, before)
    assert called(trunk.module)[nn.BatchNorm2d] == 1
    assert any("'norm_b' is not folded" in note and what in note for note in trunk.notes)
    assert_same(trunk, backbone, [], x)


def test_hooks_of_the_user_still_fire() -> None:
    backbone = with_odd_norms(SmallNet())
    heard = []
    backbone.block1.register_forward_hook(lambda *_: heard.append("block1"))
    backbone.block2[0].register_forward_pre_hook(lambda *_: heard.append("conv"))
    x = torch.randn(2, 3, 12, 12)
    trunk = made(backbone, SmallNet.taps, x)
    heard.clear()
    assert_same(trunk, backbone, SmallNet.taps, x)
    assert heard == 2 * ["block1", "conv"]
    assert any("carries hooks" in note for note in trunk.notes)


class Unusual(nn.Module):
    """Layers that occur twice or are made by others, optional arguments, constants, outputs in a dictionary."""

    class Inner(nn.Module):
        def __init__(self, conv: nn.Module) -> None:
            super().__init__()
            self.conv, self.norm = conv, nn.BatchNorm2d(4)

        def forward(self, x, scale=1.0):
            return {"y": F.relu(self.norm(self.conv(x))) * scale, "rest": (x, [None])}

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = self.Inner(conv())
        self.alias = self.inner.norm
        self.again = self.Inner(self.inner.conv)
        self.layer = layer
        self.scale = nn.Parameter(torch.full((4, 1, 1), 2.0))
        self.register_buffer("shift", torch.ones(1, 4, 1, 1))
        self.fc = nn.Linear(4, 3)

    def forward(self, x, mask=None, *, flag=False):
        if mask is not None or flag:
            raise ValueError("called with more than x")
        y = self.layer(self.inner(x)["y"]) * self.scale + self.shift + torch.ones(1)
        return self.fc(self.again(y, scale=0.5)["y"].mean((2, 3)))


@pytest.mark.parametrize("taps", [["alias"], ["layer"], ["inner.norm", "again.norm"], ["again.norm"]], ids=str)
@pytest.mark.parametrize("layer", ["weight_norm", "spectral_norm", "scripted", "Identity"])
def test_unusual_modules(layer, taps) -> None:
    layers = {
        "weight_norm": lambda: nn.utils.parametrizations.weight_norm(conv()),
        "spectral_norm": lambda: nn.utils.spectral_norm(conv()),
        "scripted": lambda: torch.jit.script(nn.Sequential(conv(), nn.ReLU())),
        "Identity": nn.Identity,
    }
    if layer == "scripted" and taps == ["layer"]:
        pytest.skip("TorchScript takes no hooks")
    backbone = with_odd_norms(Unusual(layers[layer]()))
    x = torch.randn(2, 4, 6, 6)
    before = backbone.state_dict(keep_vars=True)
    values = {name: value.clone() for name, value in before.items()}
    trunk = made(backbone, taps, x)
    assert_same(trunk, backbone, taps, torch.randn(3, 4, 6, 6))
    assert all(backbone.state_dict(keep_vars=True)[name] is value for name, value in before.items())
    assert all(torch.equal(values[name], value) for name, value in before.items())
    assert trunk.classifier.pool == "avg"


def test_an_alias_that_is_changed_in_place_is_found_out() -> None:
    def join(net, x):
        y = x
        y += 1.0  # traced as a new y
        return F.relu(net.first(x))

    backbone = with_odd_norms(Net(join))
    trunk = make_trunk(backbone, [], torch.randn(2, 4, 6, 6), "cudnn")
    assert trunk.module is backbone and "off by" in trunk.notes[0]


def test_modes_and_hooks_of_backbone_and_trunk_are_their_own() -> None:
    backbone = torchvision_model("mobilenet_v3_small")
    x = torch.randn(1, 3, 32, 32)
    trunk = made(backbone, ["features.3"], x)
    with torch.no_grad():
        says = trunk.module(x)
        backbone.train()
        backbone.features[1].register_forward_hook(lambda *_: torch.zeros(1))
        assert torch.equal(says, trunk.module(x))
        backbone.eval()
        trunk.module.train()
        trunk.classifier.train()
    assert not any(module.training for module in backbone.modules())
    assert not backbone.features[3]._forward_hooks


def test_modules_of_torch_that_hold_taps() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.fc = nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(self.encoder(x)[:, 0])

    backbone = Tokens().eval()
    x = torch.randn(2, 5, 8)
    taps = ["encoder.layers.0"]
    trunk = made(backbone, taps, x)
    assert trunk.memory_format is torch.contiguous_format and trunk.classifier.pool == "none"
    assert_same(trunk, backbone, taps, x)


def test_a_layer_that_is_not_in_the_tree_leaves_the_backbone_as_it_is() -> None:
    backbone = with_odd_norms(SmallNet())
    backbone.list = [backbone.block0, backbone.block1, backbone.block2]
    backbone.forward = lambda x: backbone.fc(backbone.list[2](backbone.list[1](backbone.list[0](x))).mean((2, 3)))
    x = torch.randn(2, 3, 12, 12)
    trunk = make_trunk(backbone, SmallNet.taps, x, "cudnn")
    assert trunk.module is backbone and trunk.classifier is None and "did not run" in trunk.notes[0]


def test_a_trunk_that_is_off_is_refused(monkeypatch) -> None:
    exact_bias = FusedConvolution._exact_bias
    monkeypatch.setattr(FusedConvolution, "_exact_bias", lambda self: exact_bias(self) + 1e-4)
    backbone = with_odd_norms(SmallNet())
    trunk = make_trunk(backbone, SmallNet.taps, torch.randn(2, 3, 12, 12), "cudnn")
    assert trunk.module is backbone and trunk.classifier is None and trunk.notes[0].startswith("Not cudnn: on the")
    trunk.refresh()


def test_a_backbone_in_training_mode_stays_as_it_is() -> None:
    backbone = with_odd_norms(SmallNet()).train()
    before = fingerprint(backbone)
    for kind in TRUNKS:
        trunk = make_trunk(backbone, SmallNet.taps, torch.randn(2, 3, 12, 12), kind)
        assert trunk.module is backbone
        assert kind == "as_is" or "eval()" in trunk.notes[0]
    assert_untouched(backbone, before)


def test_as_it_is() -> None:
    backbone = SmallNet().eval()
    x = torch.randn(2, 3, 12, 12)
    trunk = make_trunk(backbone, SmallNet.taps, x)
    assert trunk.module is backbone and trunk.classifier is None and trunk.notes
    assert trunk.memory_format is torch.contiguous_format
    assert make_trunk(backbone, SmallNet.taps, x.contiguous(memory_format=LAST)).memory_format is LAST
    trunk.refresh()


def test_bad_arguments() -> None:
    x = torch.randn(2, 3, 12, 12)
    with pytest.raises(ValueError, match=r"kind: got 'fast', wants one of 'as_is', 'cudnn', 'inductor'"):
        make_trunk(SmallNet(), [], x, "fast")
    with pytest.raises(TypeError, match="example_input: got list, wants a torch.Tensor"):
        make_trunk(SmallNet(), [], [x])
    for tap in ("block9", ""):
        with pytest.raises(ValueError, match=f"taps: the backbone has no layer '{tap}'"):
            make_trunk(SmallNet(), [tap], x)
    with pytest.raises(RuntimeError, match="'block1' ran when 'block0' should|'block0' ran when 'block1' should"):
        make_trunk(SmallNet().eval(), ["block1", "block0"], x, "cudnn")


# Compiled


@pytest.fixture
def uncompiled_on_the_cpu(request, monkeypatch):
    """The parts of a trunk run as Dynamo traced them: C++ takes ten seconds a part, and one part is enough of it."""
    if "device" not in request.fixturenames or request.getfixturevalue("device").type == "cpu":
        compiles = torch.compile
        monkeypatch.setattr(torch, "compile", lambda f, *, options, **rest: compiles(f, backend="eager", **rest))


@needs_compiler
def test_compiled_for_good(monkeypatch) -> None:
    # Inductor compiles for most of its time to see which vector instructions there are: make it scalar code
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", lambda: [], raising=False)
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False, raising=False)
    backbone = with_odd_norms(nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)))
    trunk = made(backbone, [], x := torch.randn(2, 3, 4, 4), "inductor")
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(trunk, backbone, [], x)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
def test_compiled_between_the_taps(device) -> None:
    backbone = with_odd_norms(SmallNet()).to(device)
    taps = ("block0.2", "block1")
    x = torch.randn(2, 3, 12, 12, device=device)
    before = fingerprint(backbone)
    with torch.backends.cudnn.flags(allow_tf32=False):
        trunk = made(backbone, taps, x, "inductor")
        assert_untouched(backbone, before)
        for _ in range(2):  # hooks come and go between the runs
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert_same(trunk, backbone, taps, x)
        with torch.no_grad():
            backbone.fc.weight.mul_(2.0)
        trunk.refresh()
        assert_same(trunk, backbone, taps, x)
    assert trunk.classifier is None and trunk.notes == ("Compiled between the taps: 3 parts.",)
    assert called(trunk.module)[nn.Identity] == 2
    parts = [m for name, m in trunk.module.named_children() if name.startswith("segment_")]
    assert len(parts) == 3 and all("forward" in vars(part) for part in parts)


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

    monkeypatch.setattr(torch, "compile", fails)
    backbone = SmallNet().eval()
    trunk = make_trunk(backbone, SmallNet.taps, torch.randn(2, 3, 12, 12), "inductor")
    assert trunk.module is backbone and trunk.notes == ("Not inductor: it failed with RuntimeError: no compiler",)


# On a GPU


def replayed(f):
    """A graph of f(), and what it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f()
    return graph, y


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, LAST], ids=["nchw", "channels_last"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v3_small", "googlenet"])
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
        with_relu = [conv for conv in convolutions(trunk) if conv.relu and conv.groups == 1]
        assert with_relu and all(conv.fused for conv in with_relu), trunk.notes

    static = x.contiguous(memory_format=trunk.memory_format)
    graph, y = replayed(lambda: trunk.module(static))
    for _ in range(3):
        graph.replay()
        assert torch.equal(y, trunk.module(static))
        with_odd_norms(backbone)  # and the graph sees what they are now
        trunk.refresh()
        static.normal_()


@needs_compiler
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_a_compiled_trunk_can_be_captured() -> None:
    backbone = with_odd_norms(SmallNet()).to("cuda", torch.float16).to(memory_format=LAST)
    static = torch.randn(4, 3, 32, 32, device="cuda", dtype=torch.float16).contiguous(memory_format=LAST)
    trunk = made(backbone, SmallNet.taps, static, "inductor")
    seen = []
    with listening(trunk.module, SmallNet.taps, lambda place, _y: seen.append(place)):
        graph, y = replayed(lambda: trunk.module(static))
    assert seen == [0, 1, 2]
    for _ in range(2):
        graph.replay()
        assert torch.equal(y, trunk.module(static))
        static.normal_()
