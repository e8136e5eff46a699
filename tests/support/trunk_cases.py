"""Backbones for the tests of trunks, and comparisons of a trunk with its backbone."""

import copy
import shutil
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torchvision
from auxhead.kernels import runs_triton
from auxhead.model.heads.fused_aux_head import FusedAuxHead
from auxhead.model.listening.taps import listening
from auxhead.model.trunk import timed_convolutions
from auxhead.model.trunk.fused_convolution import FusedConvolution
from auxhead.model.trunk.trunk import make_trunk
from torch import Tensor, nn

LAST = torch.channels_last

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and not torch.cuda.is_available(), reason="needs a C++ compiler"
)

#: Of those that an interpreter or a GPU runs in Triton.
TRITON = pytest.mark.skipif(not runs_triton(torch.empty(1)) and not torch.cuda.is_available(), reason="needs Triton")


def sooner(monkeypatch, which: bool) -> list:
    """Let Triton's be found to take no longer, or longer, for convolutions that are new; returns what is timed."""
    timed: list = []
    monkeypatch.setattr(timed_convolutions, "_is_sooner", {})
    monkeypatch.setattr(timed_convolutions, "takes_no_longer", lambda call, *_: timed.append(call) or which)
    return timed


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
    with listening(module, taps, lambda index, y: seen.append((index, y.clone()))):
        y = module(x)
    assert [index for index, _ in seen] == list(range(len(taps)))
    return [y for _, y in seen] + [y if classifier is None else classifier.logits(y)]


def trunk_outputs(trunk, taps, x) -> list[Tensor]:
    return outputs(trunk.module, taps, x.contiguous(memory_format=trunk.memory_format), trunk.classifier)


def logits(trunk, x) -> Tensor:
    """What the trunk says of a batch as it lies."""
    return outputs(trunk.module, (), x, trunk.classifier)[-1]


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
    """Those of the trunk that a backbone has as convolutions."""
    found = [module for module in trunk.module.modules() if isinstance(module, FusedConvolution)]
    return [module for module in found if not module.scales]


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
    "resnet18, leaves": ("resnet18", ["conv1", "layer1.0.bn1", "layer2.0.downsample", "avgpool", "fc"]),
    "bottlenecks": ("bottlenecks", ["layer1.0", "layer3"]),
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
    if name == "bottlenecks":  # of a ResNet-50, one a stage
        blocks = torchvision.models.resnet.Bottleneck
        return with_odd_norms(torchvision.models.ResNet(blocks, [1] * 4, num_classes=7, width_per_group=16))
    return with_odd_norms(getattr(torchvision.models, name)(weights=None, num_classes=7, **options))


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


def replayed(f: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of f(), and what it writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = f()
    return graph, y


class Inception(nn.Module):
    """Four branches, as GoogLeNet has them, between a stem and a tap, and once more behind it."""

    taps = ("first",)

    def __init__(self, layer: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Sequential(nn.Conv2d(3, 8, 3), layer()), Mixed(layer), Mixed(layer)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.second(self.first(self.stem(x))).mean((2, 3)))


class Mixed(nn.Module):
    """8 channels of four branches."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.one = nn.Conv2d(8, 2, 1)
        self.two = nn.Sequential(nn.Conv2d(8, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(2, 2, 3, padding=1), layer())
        self.three = nn.Sequential(nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 5, padding=2), layer())
        self.four = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(8, 2, 1), layer())
        self.last = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.one(x), self.two(x), self.three(x), self.four(x)], 1))
