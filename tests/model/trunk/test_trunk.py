"""Trunks: outputs equal the backbone's at every tap and in the end, and the backbone stays as it was."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import max_pool2d
from auxhead.model.listening.taps import listening
from auxhead.model.trunk.fused_convolution import FusedConvolution
from auxhead.model.trunk.timed_convolutions import LEAST_TIMED_BATCH, fastest_convolutions
from auxhead.model.trunk.trunk import TRUNKS, _too_far_off, make_trunk
from support.example_models import SmallNet
from support.index_networks import Shifting
from support.trunk_cases import (
    LAST,
    MODELS,
    RESNET18_BLOCKS,
    Net,
    assert_same,
    assert_untouched,
    branching_inside,
    called,
    conv,
    convolutions,
    fingerprint,
    made,
    outputs,
    torchvision_model,
    with_odd_norms,
)
from torch import Tensor, nn


@pytest.mark.parametrize("case", MODELS)
def test_torchvision_models(device, case) -> None:
    name, taps = MODELS[case]
    backbone = torchvision_model(name).to(device)
    size = 32 if "vgg" in name or device.type == "cpu" else 64  # the interpreter takes long over max-pools
    x = torch.randn(2, 3, size, size, device=device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        before = fingerprint(backbone)
        says = outputs(backbone, taps, x)
        trunk = made(backbone, taps, x)
        assert_untouched(backbone, before)
        assert all(map(torch.equal, says, outputs(backbone, taps, x)))
        other = torch.randn(3, 3, size, size, device=device)  # another batch, which is not the example
        assert_same(trunk, backbone, taps, other)
    assert trunk.memory_format is LAST
    assert convolutions(trunk) and all(conv.weight.is_contiguous(memory_format=LAST) for conv in convolutions(trunk))


class _Untraceable(Shifting):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) if ids.sum() else self.fc(ids)


@pytest.mark.parametrize("kind", [Shifting, _Untraceable])
def test_a_backbone_that_changes_its_input_in_place_sees_the_example_each_time(kind: type[Shifting]) -> None:
    """Indices are out of range the second time, which on a GPU would end its context."""
    x = torch.randint(0, 8, (8, 12))
    before = x.clone()
    trunk = make_trunk(kind().eval(), kind.taps, x, "cudnn")
    assert not any(note.startswith("Not cudnn") for note in trunk.notes), trunk.notes
    assert torch.equal(x, before)


def test_all_that_a_resnet_s_graph_still_calls() -> None:
    backbone = torchvision_model("resnet18")
    trunk = made(backbone, RESNET18_BLOCKS, torch.randn(2, 3, 32, 32))
    assert called(trunk.module) == {FusedConvolution: 20, nn.Identity: 8, max_pool2d: 1}
    relu = [conv for conv in convolutions(trunk) if conv.following == "relu"]
    plain = [conv for conv in convolutions(trunk) if conv.following != "relu"]
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


def test_made_in_inference_mode_it_still_works_outside() -> None:
    backbone = with_odd_norms(SmallNet())
    with torch.inference_mode():
        x = torch.randn(2, 3, 12, 12)
        trunk = made(backbone, SmallNet.taps, x)
    trunk.refresh()
    assert_same(trunk, backbone, SmallNet.taps, torch.randn(2, 3, 12, 12))


# What cannot be traced or folded


class BranchingRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = branching_inside()

    def forward(self, x):
        return self.net(x) if x.shape[0] > 0 and x.sum() < 1e9 else None


@pytest.mark.parametrize(
    ("at_root", "taps"),
    [
        (True, ["0", "1"]),
        (False, ["1.body", "1.layers.0", "1.layers.1", "1"]),
        (True, ["1.body.1"]),
    ],
    ids=str,
)
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
    assert sum(conv.following == "relu" for conv in convolutions(trunk)) == (3 if taps and "1.body.1" in taps[0] else 4)
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


@pytest.mark.parametrize(
    ("layer", "taps"),
    [
        ("weight_norm", ["inner.norm", "again.norm"]),
        ("spectral_norm", ["layer"]),
        ("scripted", ["alias"]),
        ("Identity", ["layer"]),
    ],
    ids=str,
)
def test_unusual_modules(layer, taps) -> None:
    layers = {
        "weight_norm": lambda: nn.utils.parametrizations.weight_norm(conv()),
        "spectral_norm": lambda: nn.utils.spectral_norm(conv()),
        "scripted": lambda: torch.jit.script(nn.Sequential(conv(), nn.ReLU())),
        "Identity": nn.Identity,
    }
    backbone = with_odd_norms(Unusual(layers[layer]()))
    x = torch.randn(2, 4, 6, 6)
    before = backbone.state_dict(keep_vars=True)
    values = {name: value.clone() for name, value in before.items()}
    trunk = made(backbone, taps, x)
    assert_same(trunk, backbone, taps, torch.randn(3, 4, 6, 6))
    assert all(backbone.state_dict(keep_vars=True)[name] is value for name, value in before.items())
    assert all(torch.equal(values[name], value) for name, value in before.items())
    assert trunk.classifier.pool == "avg"


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


@pytest.mark.parametrize("where", ["everywhere", "in one channel"])
def test_a_trunk_that_is_off_is_refused(monkeypatch, where) -> None:
    exact = FusedConvolution._exact

    def off(conv):
        weight, bias = exact(conv)
        return weight, bias + 1e-4 * (torch.ones_like(bias) if where == "everywhere" else torch.eye(len(bias))[0])

    monkeypatch.setattr(FusedConvolution, "_exact", off)
    backbone = with_odd_norms(SmallNet())
    trunk = make_trunk(backbone, SmallNet.taps, torch.randn(2, 3, 12, 12), "cudnn")
    assert trunk.module is backbone and trunk.classifier is None and trunk.notes[0].startswith("Not cudnn: on the")
    trunk.refresh()


class InFloat32Alone(nn.Linear):
    def forward(self, x):
        assert x.dtype == torch.float32
        return super().forward(x)


@pytest.mark.parametrize("kind", [nn.Linear, InFloat32Alone])
def test_an_error_of_three_times_the_backbones_own_is_allowed_in_one_number(kind) -> None:
    """And of 16 roundings; a backbone that computes in float32 alone is its own truth, within three times these."""
    backbone, x = nn.Sequential(kind(4, 6)), torch.randn(5, 4)
    weight, bias = (value.detach().double() for value in backbone.parameters())
    exact, eps = x.double() @ weight.T + bias, torch.finfo(torch.float32).eps

    def found(share: float) -> torch.Tensor:
        """Return right outputs, but for one of them, which is off by a share of the largest one."""
        y = exact.clone()
        y[3, 2] += share * exact.abs().max()
        return y.float()

    own, allowed = (1e-3, 3 * 1e-3 + 16 * eps) if kind is nn.Linear else (0.0, 3 * 16 * eps)

    def judge(outputs: torch.Tensor) -> str | None:
        with torch.no_grad():
            return _too_far_off(backbone, [], x, [found(own)], [[outputs]])

    assert judge(found(0.95 * allowed)) is None
    assert "it is off by" in judge(found(1.05 * allowed) if kind is nn.Linear else found(1.2 * allowed))
    assert "it is off by" in judge(found(torch.nan))
    assert "is [5, 6] of torch.float64, not [5, 6] of torch.float32" in judge(found(0.0).double())
    assert "is [5, 5]" in judge(found(0.0)[:, :5])


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


cudnn = torch.backends.cudnn


@pytest.mark.parametrize("before", [False, True])
def test_large_batches_are_timed_and_small_ones_left_to_the_user(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "benchmark", before)
    with fastest_convolutions(LEAST_TIMED_BATCH):
        assert cudnn.benchmark
    with fastest_convolutions(LEAST_TIMED_BATCH - 1):
        assert cudnn.benchmark is before
    with pytest.raises(KeyError), fastest_convolutions(LEAST_TIMED_BATCH):
        raise KeyError
    assert cudnn.benchmark is before


def test_nothing_is_timed_where_results_must_be_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "deterministic", True)
    with fastest_convolutions(64):
        assert not cudnn.benchmark
    monkeypatch.setattr(cudnn, "deterministic", False)
    torch.use_deterministic_algorithms(True)
    try:
        with fastest_convolutions(64):
            assert not cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)


class Told(nn.Module):
    """Notes whether cuDNN would time its algorithms while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(cudnn.benchmark)
        return x


@pytest.mark.parametrize("kind", ["as_is", "cudnn"])
@pytest.mark.parametrize("samples", [2, LEAST_TIMED_BATCH])
def test_a_trunk_is_made_and_run_with_the_fastest(kind: str, samples: int) -> None:
    told = Told()
    backbone = nn.Sequential(told, SmallNet()).eval()
    taps = [f"1.{tap}" for tap in SmallNet.taps]
    x = torch.randn(samples, 3, 16, 16)
    trunk = make_trunk(backbone, taps, x, kind)
    timed = kind == "cudnn" and samples >= LEAST_TIMED_BATCH
    assert (True in told.seen) == timed
    with trunk.choosing(samples):
        assert cudnn.benchmark == timed
    assert not cudnn.benchmark
