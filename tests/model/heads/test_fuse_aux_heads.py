"""fuse_aux_heads: heads that are replaced, and heads that are left alone and why."""

import copy

import pytest
import torch
import torchvision
from auxhead.model import ExitRule, FusedAuxHead, fuse_aux_heads
from support.example_models import assert_as_exact, in_double, plain_head, softmax_of
from torch import Tensor, nn

avg, flat, linear = nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear
X = (3, 6, 4, 5)


class Branchy(nn.Module):
    """Heads at every depth, as users keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.exits = nn.ModuleList([plain_head(6), nn.Sequential(flat(), nn.Dropout(0.1), linear(6 * 16, 5))])
        self.by_name = nn.ModuleDict({"deep": nn.ModuleDict({"aux": plain_head(6)})})
        self.classifier = plain_head(6)

    def forward(self, x: Tensor) -> list:
        x = self.stem(x)
        heads = [*self.exits, self.by_name["deep"]["aux"], self.classifier]
        return [head(x) for head in heads]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_replaces_heads_at_every_depth(device: torch.device) -> None:
    model = Branchy().to(device).eval()
    original = copy.deepcopy(model)
    report = fuse_aux_heads(model, rule=0.5)
    assert list(report.replaced) == ["exits.0", "exits.1", "by_name.deep.aux", "classifier"]
    assert not report.left_alone
    for name, head in report.replaced.items():
        assert isinstance(head, FusedAuxHead) and model.get_submodule(name) is head
    x = torch.randn(3, 3, 4, 4, device=device)
    for out, wanted, exact in zip(model(x), original(x), in_double(original)(x.double()), strict=True):
        assert_as_exact(out.probs, torch.softmax(wanted, 1), torch.softmax(exact, 1))
    with pytest.warns(UserWarning, match="no exit rule"):
        model.load_state_dict(original.state_dict())


def test_every_head_gets_a_rule_of_its_own() -> None:
    rule = ExitRule(0.5, temperature=2.0)
    heads = list(fuse_aux_heads(Branchy(), rule=rule, return_probs=False).replaced.values())
    heads[0].rule.threshold = 0.25
    assert rule.threshold == heads[1].rule.threshold == 0.5 and heads[2].rule.temperature == 2.0
    assert heads[0](torch.randn(X)).probs is None


def test_modes_are_kept() -> None:
    model = Branchy().train()
    model.exits[0].eval()
    report = fuse_aux_heads(model)
    assert not report.replaced["exits.0"].training and report.replaced["exits.1"].training


def test_a_shared_head_stays_one_head() -> None:
    model = nn.Module()
    model.a = plain_head(6)
    model.b = nn.ModuleList([model.a])
    report = fuse_aux_heads(model)
    assert list(report.replaced) == ["a", "b.0"] and model.a is model.b[0]
    assert len(list(model.parameters())) == 2


def test_a_head_within_a_shared_module_is_reported_by_each_of_its_names() -> None:
    model = nn.Module()
    model.a = nn.ModuleDict({"head": plain_head(6)})
    model.b = model.a
    assert list(fuse_aux_heads(model).replaced) == ["a.head", "b.head"]


def test_fusing_twice_changes_nothing() -> None:
    model = Branchy()
    first = fuse_aux_heads(model).replaced
    again = fuse_aux_heads(model)
    assert not again.replaced and not again.left_alone and model.classifier is first["classifier"]


def hooked() -> nn.Module:
    head = plain_head(6)
    head.register_forward_hook(lambda *_: None)
    return head


def mlp() -> list[nn.Module]:
    return [linear(120, 7), nn.ReLU(), linear(7, 8)]


LEFT_ALONE = {
    "relu in the head": (lambda: nn.Sequential(avg(1), flat(), nn.ReLU(), linear(6, 5)), "ReLU"),
    "two activations": (lambda: nn.Sequential(flat(), *mlp(), nn.ReLU(), linear(8, 5)), "second activation"),
    "tanh": (lambda: nn.Sequential(avg(1), flat(), linear(6, 7), nn.Tanh(), linear(7, 5)), "Tanh"),
    "relu at the end": (lambda: nn.Sequential(avg(1), flat(), linear(6, 5), nn.ReLU()), "ReLU"),
    "batch norm": (lambda: nn.Sequential(avg(1), flat(), nn.BatchNorm1d(6), linear(6, 5)), "BatchNorm1d"),
    "two linears": (lambda: nn.Sequential(avg(1), flat(), linear(6, 7), linear(7, 5)), "Linear"),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(6, 6, 1), avg(1), flat(), linear(6, 5)), "Conv2d"),
    "dropout after linear": (lambda: nn.Sequential(avg(1), flat(), linear(6, 5), nn.Dropout()), "Dropout"),
    "dropout before pool": (lambda: nn.Sequential(nn.Dropout(), avg(1), flat(), linear(6, 5)), "AvgPool"),
    "dropout2d": (lambda: nn.Sequential(nn.Dropout2d(), avg(1), flat(), linear(6, 5)), "Dropout2d"),
    "alpha dropout": (lambda: nn.Sequential(avg(1), flat(), nn.AlphaDropout(), linear(6, 5)), "AlphaDropout"),
    "log softmax": (lambda: nn.Sequential(avg(1), flat(), linear(6, 5), nn.LogSoftmax(1)), "LogSoftmax"),
    "softmax over samples": (lambda: nn.Sequential(avg(1), flat(), linear(6, 5), nn.Softmax(0)), "dimension 0"),
    "softmax first": (lambda: nn.Sequential(avg(1), flat(), nn.Softmax(1), linear(6, 5)), "Softmax"),
    "two softmaxes": (lambda: nn.Sequential(flat(), linear(120, 5), nn.Softmax(1), nn.Softmax(1)), "Softmax"),
    "pool of pool": (lambda: nn.Sequential(avg(2), avg(1), flat(), linear(6, 5)), "AvgPool"),
    "flatten from 2": (lambda: nn.Sequential(avg(1), flat(2), linear(1, 5)), "2 to -1"),
    "flatten all": (lambda: nn.Sequential(avg(1), flat(0), linear(18, 5)), "0 to -1"),
    "no flatten": (lambda: nn.Sequential(avg((1, 6)), linear(6, 5)), "without a Flatten"),
    "pool as tall as the map": (lambda: nn.Sequential(avg((None, 1)), flat(), linear(24, 5)), "from the input"),
    "indices": (lambda: nn.Sequential(nn.AdaptiveMaxPool2d(1, return_indices=True), flat(), linear(6, 5)), "indices"),
    "fixed pool that strides": (lambda: nn.Sequential(nn.AvgPool2d(4, 2), flat(), linear(6, 5)), "AvgPool2d"),
    "hooked nested": (lambda: nn.Sequential(hooked(), linear(5, 4)), "hook"),
    "lazy linear": (lambda: nn.Sequential(avg(1), flat(), nn.LazyLinear(5)), "LazyLinear"),
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_leaves_alone_what_it_could_not_stand_in_for(kind: str) -> None:
    make, why = LEFT_ALONE[kind]
    model = nn.ModuleDict({"head": make()})
    before = model["head"]
    report = fuse_aux_heads(model)
    assert not report.replaced and model["head"] is before
    assert next(iter(report.left_alone)) == "head"
    assert why in report.left_alone["head"]
    with pytest.raises(ValueError, match="^module: "):
        FusedAuxHead.from_module(before)


def test_double_precision_is_swapped_on_the_cpu() -> None:
    model = nn.ModuleDict({"head": plain_head(6).double()})
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    wanted = model["head"](x).softmax(1)
    assert fuse_aux_heads(model).replaced.keys() == {"head"}
    torch.testing.assert_close(model["head"](x).probs, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_double_precision_on_a_gpu_is_left_alone_for_a_head_cannot_read_it() -> None:
    model = nn.ModuleDict({"head": plain_head(6).double().cuda()})
    report = fuse_aux_heads(model)
    assert not report.replaced and "float64" in report.left_alone["head"]


@pytest.mark.parametrize("deep", [False, True])
def test_part_of_a_longer_chain_is_left_alone(deep: bool) -> None:
    """What comes next in an nn.Sequential takes a tensor, not a HeadOutput."""
    part = nn.Sequential(flat(), linear(120, 8))
    part = nn.Sequential(nn.Tanh(), part) if deep else part
    model = nn.ModuleDict({"mlp": nn.Sequential(part, nn.Tanh(), linear(8, 5))})
    x = torch.randn(X)
    before = model["mlp"](x)
    assert not fuse_aux_heads(model).replaced
    assert torch.equal(model["mlp"](x), before)


def test_the_last_part_of_a_chain_is_replaced() -> None:
    model = nn.ModuleDict({"net": nn.Sequential(nn.Sequential(nn.Conv2d(6, 6, 1), nn.ReLU()), plain_head(6))})
    report = fuse_aux_heads(model)
    assert list(report.replaced) == ["net.1"]
    assert model["net"](torch.randn(X)).probs.shape == (3, 5)


def test_a_model_that_is_itself_a_head_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="FusedAuxHead.from_module"):
        fuse_aux_heads(plain_head(6))


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.ReLU(), nn.Sequential(), nn.ModuleList(), FusedAuxHead(3, 3)])
def test_models_without_heads(model: nn.Module) -> None:
    report = fuse_aux_heads(model)
    assert not report.replaced and not report.left_alone


def test_children_that_are_none() -> None:
    model = Branchy()
    model.register_module("absent", None)
    model.exits[0].register_module("3", None)
    assert len(fuse_aux_heads(model).replaced) == 4


#: Of torchvision's models, what is replaced and what is left alone: nothing but what ends in class scores.
TORCHVISION: dict[str, tuple[list[str], list[str]]] = {
    "alexnet": ([], ["classifier"]),
    "convnext_tiny": ([], ["classifier"]),
    "densenet121": ([], []),
    "efficientnet_b0": (["classifier"], []),
    "googlenet": ([], ["aux1", "aux2"]),
    "inception_v3": ([], ["AuxLogits"]),
    "maxvit_t": ([], ["classifier"]),
    "mobilenet_v2": (["classifier"], []),
    "mobilenet_v3_small": (["classifier"], []),  # of a hidden layer with Hardswish
    "mobilenet_v3_large": ([], ["classifier"]),  # which has 1,280 hidden features
    "resnet18": ([], []),
    "squeezenet1_1": ([], []),
    "swin_t": ([], []),
    "vgg11": ([], ["classifier"]),
    "vit_b_16": (["heads"], []),
}


def torchvision_model(name: str) -> nn.Module:
    options = {"init_weights": False, "aux_logits": True} if name in ("googlenet", "inception_v3") else {}
    return getattr(torchvision.models, name)(weights=None, **options)


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_models_are_reported_right(name: str) -> None:
    with torch.device("meta"):  # the structure is all that counts here
        report = fuse_aux_heads(torchvision_model(name))
    assert (list(report.replaced), list(report.left_alone)) == TORCHVISION[name]


@pytest.mark.parametrize("name", ["googlenet", "mobilenet_v2", "mobilenet_v3_small"])
def test_torchvision_models_still_run(name: str) -> None:
    model = torchvision_model(name).eval()
    x = torch.randn(2, 3, 32, 32)
    wanted = softmax_of(model, x)
    replaced = fuse_aux_heads(model).replaced
    torch.testing.assert_close(model(x).probs if replaced else softmax_of(model, x), wanted)


def test_aux_heads_of_torchvision_are_told_what_to_do() -> None:
    """The ends of these two: fc2 reads what fc1 gives; fc reads a pooled map."""
    reasons = {}
    for name in ("googlenet", "inception_v3"):
        with torch.device("meta"):
            reasons |= fuse_aux_heads(torchvision_model(name)).left_alone
    assert all("is an InceptionAux" in why and "\n" not in why for why in reasons.values())
    assert "FusedAuxHead.from_module(nn.Sequential(head.fc2))" in reasons["aux1"]
    pooled = "FusedAuxHead.from_module(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head.fc))"
    assert pooled in reasons["AuxLogits"]


class WithFeatures(nn.Module):
    """An exit, and features that look like heads and whose output goes on to the next layer."""

    def __init__(self, width: int, *before: nn.Module) -> None:
        super().__init__()
        self.exit = plain_head(6)
        self.features = nn.Sequential(*before, linear(6, width))
        self.next = linear(width, 5)

    def forward(self, x: Tensor) -> tuple:
        return self.exit(x), self.next(self.features(x).relu())


FEATURES = {
    "flattened": (lambda: WithFeatures(84, flat()), (3, 6, 1, 1), ["exit"]),
    "normed": (lambda: WithFeatures(84, nn.LayerNorm(6)), (3, 4, 6), []),
    "pooled": (lambda: WithFeatures(84, avg(1), flat()), (3, 6, 4, 4), ["exit"]),
    "as many as classes": (lambda: WithFeatures(5, flat()), (3, 6, 1, 1), []),  # nothing tells one from the other
}


@pytest.mark.parametrize("kind", FEATURES)
def test_features_within_a_backbone_are_left_alone(kind: str) -> None:
    make, shape, replaced = FEATURES[kind]
    model, x = make().eval(), torch.randn(shape)
    if len(shape) == 3:  # tokens
        model.exit = nn.Identity()
    wanted = model(x)
    assert list(fuse_aux_heads(model).replaced) == replaced
    assert torch.equal(model(x)[1], wanted[1])


def test_features_are_replaced_by_name() -> None:
    assert list(fuse_aux_heads(WithFeatures(84, flat()), include="features").replaced) == ["features"]


def test_a_head_with_as_many_features_as_classes_is_replaced() -> None:
    """It reads a map, so that no head's scores can come in."""
    model = nn.ModuleDict({"first": plain_head(5), "second": plain_head(5)})
    assert list(fuse_aux_heads(model).replaced) == ["first", "second"]


class Gated(nn.Module):
    """A gate as wide as there are classes, in a block; and one that is named."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.convolutions = nn.Sequential(*(nn.Conv2d(5, 5, 1) for _ in range(3)))
        self.block.gate = nn.Sequential(avg(1), flat(), linear(5, 5))
        self.exits = nn.ModuleList([nn.Sequential(avg(1), flat(), linear(5, 5))])
        self.classifier = plain_head(5)

    def forward(self, x: Tensor) -> list:
        x = self.block.convolutions(x) * self.block.gate(x).sigmoid()[:, :, None, None]
        return [self.exits[0](x), self.classifier(x)]


def test_a_gate_as_wide_as_the_classes_is_left_alone() -> None:
    model, x = Gated().eval(), torch.randn(3, 5, 4, 4)
    wanted = [y.softmax(1) for y in model(x)]
    report = fuse_aux_heads(model)
    assert list(report.replaced) == ["exits.0", "classifier"]
    assert report.left_alone == {"block.gate": "gives 5 numbers for 5, as a gate does; include it by name if not"}
    for found, probs in zip(model(x), wanted, strict=True):
        torch.testing.assert_close(found.probs, probs)
    assert list(fuse_aux_heads(model, include="block.gate").replaced) == ["block.gate"]
