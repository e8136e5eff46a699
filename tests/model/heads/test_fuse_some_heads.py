"""Heads written as classes, candidates that are none, and fuse_aux_heads told by name what to swap."""

import re
from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, fuse_aux_heads
from support.example_models import SmallNet, plain_head
from torch import Tensor, nn

X = (3, 6, 4, 5)


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
def test_a_head_of_ones_own_is_told_what_to_write_instead(kind: str) -> None:
    make, remedy = WRITTEN[kind]
    head = make().eval()
    with pytest.raises(ValueError, match="^module: is an? ") as caught:
        FusedAuxHead.from_module(head)
    assert remedy in str(caught.value)
    assert remedy in EarlyExitNetwork(SmallNet(), {"block0": head}).describe()  # runs, but not fused
    report = fuse_aux_heads(nn.ModuleDict({"body": SmallNet(), "exits": nn.ModuleList([head])}))
    assert list(report.left_alone) == ["exits.0"] and remedy in report.left_alone["exits.0"]


@pytest.mark.parametrize("kind", ["pool", "functional", "linear"])
def test_what_is_advised_answers_as_the_head_did(kind: str) -> None:
    head, x = WRITTEN[kind][0]().eval(), torch.randn(X)
    with pytest.raises(ValueError) as caught:
        FusedAuxHead.from_module(head)
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


def test_a_head_that_reads_vectors_gives_class_scores_or_is_named() -> None:
    """Linear and Dropout are how a block of MViT ends its attention."""
    block = nn.Module()
    block.project = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1))
    model = nn.Module()
    model.block, model.head = block, nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 5))
    model.eval()
    assert [*fuse_aux_heads(model).replaced] == ["head"]
    assert [*fuse_aux_heads(model, include="block.project").replaced] == ["block.project"]


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


def test_of_nested_candidates_the_outer_is_named_once() -> None:
    inner = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.LogSoftmax(1))
    report = fuse_aux_heads(nn.ModuleDict({"exit": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Identity(), Head())}))
    assert list(report.left_alone) == ["exit"]
    report = fuse_aux_heads(nn.ModuleDict({"exit": nn.Sequential(nn.ReLU(), inner)}))
    assert list(report.left_alone) == ["exit"]


def test_a_class_around_a_head_that_was_replaced_is_not_left_alone() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = plain_head(6)

    report = fuse_aux_heads(nn.ModuleDict({"exit": Around()}))
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
        ({"exclude": "*"}, [], []),
        ({"exclude": ()}, ["exits.0", "exits.1", "classifier"], ["odd.exit"]),
        ({"include": "exits.1"}, ["exits.1"], []),
        ({"include": "exits"}, ["exits.0", "exits.1"], []),
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
        ({"include": "odd"}, ValueError, "include: 'odd.exit': is a Head "),
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


def test_heads_that_are_fused_already_may_be_included_again() -> None:
    model = MultiExit()
    fuse_aux_heads(model, include="exits")
    before = list(model.modules())
    assert fuse_aux_heads(model, include=["exits", "exits.1"]) == ({}, {})
    assert list(model.modules()) == before
