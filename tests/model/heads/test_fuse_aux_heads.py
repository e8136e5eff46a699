"""fuse_aux_heads: heads that are replaced, by their shape or by name, and heads that are left alone and why."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torchvision
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead, fuse_aux_heads
from support.example_models import SmallNet, assert_as_exact, in_double, plain_head, softmax_of
from support.head_sequentials import seq
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


def test_fusing_twice_changes_nothing() -> None:
    """Of heads that are named, either."""
    model = Branchy()
    fuse_aux_heads(model)
    before = list(model.modules())
    assert fuse_aux_heads(model) == ({}, {})
    assert fuse_aux_heads(model, include=["exits", "exits.1"]) == ({}, {})
    assert list(model.modules()) == before


def hooked() -> nn.Module:
    head = plain_head(6)
    head.register_forward_hook(lambda *_: None)
    return head


def mlp() -> list[nn.Module]:
    return [linear(120, 7), nn.ReLU(), linear(7, 8)]


OUT_OF_PLACE = "is out of place: a fused head has ReLU, pool, Flatten"
LEFT_ALONE = {
    "relu in the head": (lambda: seq(avg(1), flat(), nn.ReLU(), linear(6, 5)), "ReLU"),
    "two activations": (lambda: seq(flat(), *mlp(), nn.ReLU(), linear(8, 5)), OUT_OF_PLACE),
    "tanh": (lambda: seq(avg(1), flat(), linear(6, 7), nn.Tanh(), linear(7, 5)), "Tanh"),
    "relu at the end": (lambda: seq(avg(1), flat(), linear(6, 5), nn.ReLU()), "ends with an activation"),
    "gelu before the pool": (lambda: seq(nn.GELU(), avg(1), flat(), linear(6, 5)), OUT_OF_PLACE),
    "relu that changes the tap": (
        lambda: seq(nn.ReLU(inplace=True), avg(1), flat(), linear(6, 5)), "changes in place .* wants inplace=False",
    ),
    "hidden layer too wide": (
        lambda: seq(flat(), linear(120, 1025), nn.ReLU(), linear(1025, 5)), "1,025 hidden features, wants",
    ),
    "batch norm": (lambda: seq(avg(1), flat(), nn.BatchNorm1d(6), linear(6, 5)), "BatchNorm1d"),
    "two linears": (lambda: seq(avg(1), flat(), linear(6, 7), linear(7, 5)), "Linear"),
    "convolution": (lambda: seq(nn.Conv2d(6, 6, 1), avg(1), flat(), linear(6, 5)), "Conv2d"),
    "dropout after linear": (lambda: seq(avg(1), flat(), linear(6, 5), nn.Dropout()), "Dropout"),
    "dropout before pool": (lambda: seq(nn.Dropout(), avg(1), flat(), linear(6, 5)), OUT_OF_PLACE),
    "dropout before the activation": (
        lambda: seq(flat(), linear(120, 9), nn.Dropout(), nn.ReLU(), linear(9, 5)), OUT_OF_PLACE,
    ),
    "dropout2d": (lambda: seq(nn.Dropout2d(), avg(1), flat(), linear(6, 5)), "Dropout2d"),
    "log softmax": (lambda: seq(avg(1), flat(), linear(6, 5), nn.LogSoftmax(1)), "LogSoftmax"),
    "softmax over samples": (lambda: seq(avg(1), flat(), linear(6, 5), nn.Softmax(0)), "dimension 0"),
    "softmax first": (lambda: seq(avg(1), flat(), nn.Softmax(1), linear(6, 5)), OUT_OF_PLACE),
    "two softmaxes": (lambda: seq(flat(), linear(120, 5), nn.Softmax(1), nn.Softmax(1)), "Softmax"),
    "pool of pool": (lambda: seq(avg(2), avg(1), flat(), linear(6, 5)), OUT_OF_PLACE),
    "flatten from 2": (lambda: seq(avg(1), flat(2), linear(1, 5)), "2 to -1"),
    "no flatten": (lambda: seq(avg((1, 6)), linear(6, 5)), OUT_OF_PLACE),
    "pool as tall as the map": (lambda: seq(avg((None, 1)), flat(), linear(24, 5)), "from the input"),
    "indices": (lambda: seq(nn.AdaptiveMaxPool2d(1, return_indices=True), flat(), linear(6, 5)), "indices"),
    "a window that strides": (lambda: seq(nn.AvgPool2d(4, 2), flat(), linear(6, 5)), "strides, pads or divides"),
    "a window that pads": (lambda: seq(nn.AvgPool2d(3, padding=1), flat(), linear(36, 5)), "strides, pads or divides"),
    "maximum of a window": (lambda: seq(nn.MaxPool2d(5), flat(), linear(6, 5)), "MaxPool2d. is none of"),
    "norm of a map": (lambda: seq(nn.LayerNorm(7), flat(), linear(120, 5)), OUT_OF_PLACE),
    "norm before the flatten": (
        lambda: seq(avg((1, 6)), nn.LayerNorm(6), flat(), linear(36, 5)), OUT_OF_PLACE,
    ),
    "norm of two dimensions": (
        lambda: seq(flat(), nn.LayerNorm((120, 1)), linear(120, 5)), r"is over \[120, 1\], not over all 120",
    ),
    "norm behind the hidden layer": (
        lambda: seq(flat(), linear(120, 9), nn.ReLU(), nn.LayerNorm(9), linear(9, 5)), OUT_OF_PLACE,
    ),
    "hooked nested": (lambda: seq(hooked(), linear(5, 4)), "hook"),
    "lazy linear": (lambda: seq(avg(1), flat(), nn.LazyLinear(5)), "LazyLinear"),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_leaves_alone_what_it_could_not_stand_in_for(kind: str) -> None:
    make, why = LEFT_ALONE[kind]
    head = make()
    model = nn.ModuleDict({"head": head})
    report = fuse_aux_heads(model)
    assert not report.replaced and model["head"] is head
    assert next(iter(report.left_alone)) == "head"
    assert re.search(why, report.left_alone["head"])
    with pytest.raises(ValueError, match=f"^module: .*{why}"):
        FusedAuxHead.from_module(head)
    network = EarlyExitNetwork(SmallNet(), {"block1": head})
    assert not network.fused_heads and re.search(why, network.exit_heads[0].why_not_fused)


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


#: Of torchvision's models, what is replaced and what is left alone: nothing but what ends in class scores.
TORCHVISION: dict[str, tuple[list[str], list[str]]] = {
    "googlenet": ([], ["aux1", "aux2"]),
    "inception_v3": ([], ["AuxLogits"]),
    "mobilenet_v3_small": (["classifier"], []),  # of a hidden layer with Hardswish
    "mobilenet_v3_large": ([], ["classifier"]),  # which has 1,280 hidden features
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


def test_a_torchvision_model_still_runs() -> None:
    model, x = torchvision_model("mobilenet_v3_small").eval(), torch.randn(2, 3, 32, 32)
    wanted = softmax_of(model, x)
    assert fuse_aux_heads(model).replaced
    torch.testing.assert_close(model(x).probs, wanted)


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


class Head(nn.Module):
    """A head as people write them."""

    def __init__(self, channels: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.pool = nn.AdaptiveMaxPool2d(2)
        self.fc = nn.Linear(4 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(x).flatten(1))


class Functional(nn.Module):
    """One that pools without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.ModuleDict({"out": nn.ModuleList([nn.Linear(6, 5)])})

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier["out"][0](x.mean((2, 3)))


class Mlp(nn.Module):
    """One whose last layer reads a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x.mean((2, 3))).relu())


WRITTEN = {
    "pool": (Head, "nn.Sequential(head.pool, nn.Flatten(), head.fc)"),
    "functional": (Functional, "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head.classifier['out'][0])"),
    "mlp": (Mlp, "nn.Sequential(head.fc2)"),
    "linear": (lambda: nn.Linear(6, 5), "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)"),
}


def remedy_in(said: str) -> str:
    """Return the code that a message advises."""
    assert "\n" not in said
    found = re.search(r"use (FusedAuxHead\.from_module\(nn\.Sequential\(.*\)\)) for", said)
    assert found, said
    return found[1]


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_head_of_ones_own_is_told_what_to_write_instead_which_answers_as_it_did(kind: str) -> None:
    make, remedy = WRITTEN[kind]
    head, x = make().eval(), torch.randn(X)
    with pytest.raises(ValueError, match="^module: is an? ") as caught:
        FusedAuxHead.from_module(head)
    assert remedy in str(caught.value)
    assert remedy in EarlyExitNetwork(SmallNet(), {"block0": head}).describe()  # runs, but not fused
    report = fuse_aux_heads(nn.ModuleDict({"body": SmallNet(), "exits": nn.ModuleList([head])}))
    assert list(report.left_alone) == ["exits.0"] and remedy in report.left_alone["exits.0"]
    if kind != "mlp":  # of which its last layer alone is advised
        fused = eval(remedy_in(str(caught.value)), {"FusedAuxHead": FusedAuxHead, "nn": nn, "head": head})
        wanted = head(x.mean((2, 3)) if kind == "linear" else x)
        torch.testing.assert_close(fused(x).probs, torch.softmax(wanted, 1))


@pytest.mark.parametrize("module", [None, "head", FusedAuxHead, 5], ids=str)
def test_what_is_no_module_is_refused_by_name(module: object) -> None:
    with pytest.raises(TypeError, match="^module: got .*, wants an nn.Module"):
        FusedAuxHead.from_module(module)
    with pytest.raises(TypeError, match="^model: got .*, wants an nn.Module"):
        fuse_aux_heads(module)


def squeeze(channels: int) -> nn.Sequential:
    parts = (nn.Linear(channels, 2), nn.ReLU(), nn.Linear(2, channels), nn.Sigmoid())
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), *parts)


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "mlp of a transformer": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)),
    "squeeze by functions": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8)
    ),
    "squeeze and excite": lambda: squeeze(8),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "backbone": SmallNet,
}


@pytest.mark.parametrize("kind", ORDINARY)
def test_ordinary_blocks_are_no_candidates(kind: str) -> None:
    """Wherever the head is registered that says how many classes there are."""
    for names in (("head", "block"), ("block", "head")):
        parts = {"head": plain_head(6), "block": nn.ModuleDict({"a": ORDINARY[kind](), "b": ORDINARY[kind]()})}
        report = fuse_aux_heads(nn.ModuleDict({name: parts[name] for name in names}))
        assert list(report.replaced) == ["head"] and not report.left_alone


def test_a_head_with_hidden_layers_gives_class_scores_or_is_named() -> None:
    def head(outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, outputs))

    model = nn.ModuleDict({"other": head(3), "exit": head(5), "last": plain_head(6)})
    assert list(fuse_aux_heads(model).replaced) == ["exit", "last"]
    model = nn.ModuleDict({"other": head(3), "exit": head(5), "last": plain_head(6)})
    assert list(fuse_aux_heads(model, include=["ot*", "exit"]).replaced) == ["other", "exit"]
    with pytest.raises(ValueError, match="include: 'block' has no head in it"):
        fuse_aux_heads(nn.ModuleDict({"block": nn.ModuleDict({"a": head(3)}), "last": plain_head(6)}), include="block")


def test_a_model_without_a_classifier_has_no_candidates() -> None:
    blocks = [ORDINARY["mlp of a transformer"]() for _ in range(3)]
    assert fuse_aux_heads(nn.ModuleList(blocks)) == ({}, {})


def test_of_nested_candidates_one_is_named() -> None:
    """The outer one, unless the inner was replaced."""
    inner = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.LogSoftmax(1))
    for outer in (nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Identity(), Head()), nn.Sequential(nn.ReLU(), inner)):
        assert list(fuse_aux_heads(nn.ModuleDict({"exit": outer})).left_alone) == ["exit"]
    around = type("Around", (nn.Module,), {})()
    around.fc = plain_head(6)
    report = fuse_aux_heads(nn.ModuleDict({"exit": around}))
    assert list(report.replaced) == ["exit.fc"] and not report.left_alone


class MultiExit(nn.Module):
    """Two heads of a known shape, one written as a class, and a main classifier of a known shape."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Conv2d(3, 6, 3)
        self.exits = nn.ModuleList([plain_head(6), plain_head(6)])
        self.odd = nn.ModuleDict({"exit": Head()})
        self.classifier = plain_head(6)


@pytest.mark.parametrize(
    ("options", "replaced", "left_alone"),
    [
        ({}, ["exits.0", "exits.1", "classifier"], ["odd.exit"]),
        ({"exclude": "classifier"}, ["exits.0", "exits.1"], ["odd.exit"]),
        ({"exclude": ["class*", "odd"]}, ["exits.0", "exits.1"], []),
        ({"exclude": ("*.1", "odd.exit")}, ["exits.0", "classifier"], []),
        ({"include": "exits.1"}, ["exits.1"], []),
        ({"include": "exits.*"}, ["exits.0", "exits.1"], []),
        ({"include": ["exits.0", "classifier"]}, ["exits.0", "classifier"], []),
        ({"include": "*", "exclude": ["odd", "exits.0"]}, ["exits.1", "classifier"], []),
        ({"include": "exits", "exclude": "exits.0"}, ["exits.1"], []),
    ],
    ids=str,
)
def test_heads_are_chosen_by_name(options: dict, replaced: list, left_alone: list) -> None:
    model = MultiExit()
    report = fuse_aux_heads(model, **options)
    assert list(report.replaced) == replaced and list(report.left_alone) == left_alone
    for name, module in model.named_modules():
        assert isinstance(module, FusedAuxHead) == (name in replaced)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"include": "exit"},
            ValueError,
            "include: 'exit' is the name of no module of the model; close to it: odd.exit",
        ),
        ({"exclude": "clasifier"}, ValueError, "exclude: 'clasifier' is .*; close to it: classifier"),
        ({"exclude": ["classifier", "aux*"]}, ValueError, "exclude: 'aux*' is the name of no module"),
        ({"include": "odd.exit"}, ValueError, "include: 'odd.exit': is a Head .*head.fc"),
        ({"include": "*"}, ValueError, "include: 'odd.exit': is a Head "),
        ({"include": "block"}, ValueError, "include: 'block' has no head in it: is a Conv2d"),
        ({"include": "exits.0.2"}, ValueError, "include: 'exits.0.2' has no head in it: is a Linear"),
        ({"include": "classifier", "exclude": "class*"}, ValueError, "include: 'classifier' is excluded"),
        ({"include": 3}, TypeError, "include: got int, wants a name, a pattern or a sequence of them"),
        ({"exclude": [3]}, TypeError, r"exclude: got \[3\], wants"),
        ({"exclude": None}, TypeError, "exclude: got NoneType, wants"),
    ],
    ids=str,
)
def test_names_that_choose_nothing_good_are_refused_and_change_nothing(
    options: dict, error: type[Exception], message: str
) -> None:
    model = MultiExit()
    before = list(model.modules())
    with pytest.raises(error, match="^" + message.replace("*'", r"\*'")) as caught:
        fuse_aux_heads(model, **options)
    assert "\n" not in str(caught.value)
    assert list(model.modules()) == before


def test_a_head_that_cannot_be_made_is_named_and_none_is_replaced() -> None:
    model = nn.ModuleDict({"good": plain_head(6, 4), "bad": plain_head(6, 4)})
    model["bad"][0].output_size = 0
    good = model["good"]
    with pytest.raises(ValueError, match=r"^bad: pool_size: got \(0, 0\)"):
        fuse_aux_heads(model)
    assert model["good"] is good


def test_a_norm_of_another_dtype_is_left_alone() -> None:
    head = seq(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 4).bfloat16())
    report = fuse_aux_heads(nn.ModuleDict({"head": head.eval()}))
    assert "(LayerNorm) is torch.float32, and the Linear behind it torch.bfloat16" in report.left_alone["head"]
