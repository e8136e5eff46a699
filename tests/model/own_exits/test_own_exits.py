"""Exits of a model's own are taken over by what was recorded: right whatever its parameters become, in both modes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from auxhead.model import (
    EarlyExitNetwork,
    FusedAuxHead,
    ModuleHead,
    accelerate,
    attach,
    attach_exits,
    fuse_aux_heads,
    load_checkpoint,
    save_checkpoint,
)
from support.multi_exit_models import CLASSES, block
from support.own_exit_models import (
    Clamped,
    MaskOfSamples,
    Net,
    change,
    exits,
    images,
    parameter,
    parts,
    pooled,
    seeded,
    variant,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

pytestmark = pytest.mark.usefixtures("without_interpreter")


class TiedWeights(Net):
    def make(self) -> None:
        self.f2 = nn.Linear(8, CLASSES)
        self.f2.weight = self.f1.weight

    def two(self, b: Tensor) -> Tensor:
        return self.f2(b[:, :8].mean((2, 3)))


class OwnForward(Net):
    def make(self) -> None:
        self.f1.forward = self.tripled

    def tripled(self, x: Tensor) -> Tensor:
        return 3.0 * F.linear(x, self.f1.weight, self.f1.bias)


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1), self.bias)


class InPlaceAfterwards(Net):
    """The next block changes in place what the head has read, so that no layer keeps it."""

    def make(self) -> None:
        self.b2 = nn.Sequential(nn.ReLU(inplace=True), block(8, 12))
        self.b1 = self.b1[:2]

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        one = self.one(a)
        b = self.b2(a)
        return [one, self.two(b), self.last(self.b3(b))]


class Functional(Net):
    """A head with a hidden layer, a norm and dropout, by functions."""

    def make(self) -> None:
        self.norm, self.hidden = nn.LayerNorm(8), nn.Linear(8, 8)

    def one(self, a: Tensor) -> Tensor:
        y = F.gelu(self.hidden(F.dropout(self.norm(a.mean((2, 3))), 0.1, self.training)))
        return self.f1(F.dropout(y, 0.3, self.training))


class InADict(Net):
    """Layers where PyTorch does not look, methods bound to the module, an attribute that is a layer's method."""

    def make(self) -> None:
        self.heads = {"one": self.f1}
        self.blocks = [self.b1, (self.b2, self.b3)]
        self.forward = self.by_lists

    def by_lists(self, x: Tensor) -> Any:
        a = self.blocks[0](x)
        b = self.blocks[1][0](a)
        return [self.heads["one"](a.mean((2, 3))), self.two(b), self.last(self.blocks[1][1](b))]


#: What there is of a head, and whether it is fused whole.
TAKEN: dict[str, tuple[type[Net], bool]] = {
    "plain": (Net, True),
    "a scale of logits": (variant(parts(g=parameter(1)), one=lambda net, a: Net.one(net, a) * net.g), False),
    "a scale of features": (variant(parts(g=parameter(8)), one=lambda net, a: net.f1(a.mean((2, 3)) * net.g)), False),
    "a gate, closed at first": (
        variant(
            parts(g=parameter(1, value=0.0), other=lambda: nn.Linear(8, CLASSES)),
            one=lambda net, a: Net.one(net, a) + net.g * net.other(a.amax((2, 3))),
        ),
        False,
    ),
    "attention": (  # by a query that is zero at first, and so a mean
        variant(
            parts(query=parameter(8, value=0.0)),
            one=lambda net, a: net.f1(((t := a.flatten(2)) * (net.query @ t).softmax(1)[:, None]).sum(2)),
        ),
        False,
    ),
    "a clamp": (Clamped, False),
    "a temperature": (variant(parts(T=lambda: 1.0), one=lambda net, a: Net.one(net, a) / net.T), False),
    "tied weights": (TiedWeights, False),
    "normalised weights": (
        variant(lambda net: (parametrizations.weight_norm(net.f1), parametrizations.spectral_norm(net.f2))), False
    ),
    "pruned weights": (variant(lambda net: prune.l1_unstructured(net.f1, "weight", 0.5)), False),
    "hooks": (
        variant(lambda net: (
            net.f1.register_forward_hook(lambda _m, _x, y: 3.0 * y),
            net.f2.register_forward_pre_hook(lambda _m, x: F.normalize(x[0], dim=1)),
        )),
        False,
    ),
    "a forward of its own": (OwnForward, False),
    "a subclass": (variant(parts(f1=lambda: Cosine(8, CLASSES))), False),
    "changed in place afterwards": (InPlaceAfterwards, False),
    "a stack": (variant(answers=lambda net, *said: torch.stack(said, 1)), True),
    "a ReLU": (
        variant(lambda net: setattr(net, "b1", net.b1[:2]), one=lambda net, a: net.f1(a.relu().mean((2, 3)))), True
    ),
    "functions": (Functional, True),
    "convolutions": (
        variant(
            parts(c1=lambda: block(8, 8), c2=lambda: nn.Sequential(nn.Conv2d(12, 12, 1), nn.Dropout2d(0.2))),
            one=lambda net, a: net.f1(net.c1(a).mean((2, 3))),
            two=lambda net, b: net.f2(net.c2(b).amax((2, 3))),
        ),
        False,
    ),
    "in a dict": (InADict, True),
}  # fmt: skip


#: Those in which dropout or statistics of a batch do not make training mode differ.
ALIKE = "plain", "a scale of logits", "a gate, closed at first", "a ReLU", "a clamp", "a temperature", "in a dict"


def test_other_masks_are_no_dropout() -> None:
    heads = attach_exits(MaskOfSamples().eval(), images()).fused_heads
    assert not heads


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_over_stays_right_in_both_modes(name: str) -> None:
    kind, is_whole = TAKEN[name]
    model = kind().eval()
    network = attach_exits(model, images())
    first, *others = network.fused_heads or [None]
    assert (len(others) == 1) == is_whole
    if kind is Functional:
        assert (first.dropout, first.hidden.dropout) == pytest.approx((0.1, 0.3))
    assert name != "a ReLU" or first.hidden.rectifies
    for later in (lambda: None, lambda: change(model)):
        later()
        if hasattr(model, "T"):
            network.backbone.model.T = model.T  # of the copy, in line
        for x in (images(), 30 * images(7)):
            torch.testing.assert_close(network.logits(x), [*exits(model(x))], rtol=1e-4, atol=1e-4)
    reference = kind()
    reference.load_state_dict(model.state_dict())
    reference.T = 0.5  # which one kind reads
    network.train(), reference.train()
    x = images(6)
    for mine, its in zip(seeded(lambda: network.logits(x)), seeded(lambda: exits(reference(x))), strict=True):
        assert mine.shape == its.shape and mine.requires_grad
        if name in (*ALIKE, "a stack"):
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    assert not any(part.training for part in model.modules())


#: Binary classifiers, whose logit a sigmoid is to read: with exits of their own, and without.
OF_ONE = parts(f1=lambda: nn.Linear(8, 1), f2=lambda: nn.Linear(12, 1), f3=lambda: nn.Linear(16, 1))
OneLogit, Binary = variant(OF_ONE), variant(OF_ONE, answers=lambda net, one, two, last: last)


@pytest.mark.parametrize(
    "door",
    [
        lambda x: FusedAuxHead(8, 1),
        lambda x: FusedAuxHead.from_module(pooled(1)),
        lambda x: ModuleHead(pooled(1), num_classes=1),
        lambda x: EarlyExitNetwork(Binary().eval(), {"b1": pooled(1)}, example_input=x),
        lambda x: attach(Binary().eval(), example_input=x),
        lambda x: attach(OneLogit().eval(), example_input=x),
        lambda x: attach_exits(OneLogit().eval(), x),
        lambda x: accelerate(OneLogit().eval(), x),
    ],
)
def test_one_logit_is_refused_in_every_door(door: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="got one logit, .* wants two: those of a linear layer with two rows"):
        door(images())
    assert not fuse_aux_heads(nn.Sequential(nn.Conv2d(3, 8, 3), pooled(1)).eval()).replaced


def test_two_logits_of_which_the_first_is_0_say_what_a_sigmoid_says() -> None:
    linear, x = nn.Linear(8, 1), torch.randn(5, 8, 4, 4)
    head = FusedAuxHead(8, 2)
    with torch.no_grad():
        for two, one in zip(head.linear.parameters(), linear.parameters(), strict=True):
            two[0], two[1] = 0.0, one[0]
        torch.testing.assert_close(head(x).probs[:, 1], linear(x.mean((2, 3)))[:, 0].sigmoid())


class Signals(nn.Module):
    """A network of signals [N, C, L], with widths that NumPy has counted, and an ``eval`` that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        width, hidden = numpy.array([8, 16])
        self.b1, self.b2 = nn.Conv1d(2, width, 3), nn.Conv1d(width, width, 3)
        pool = nn.AdaptiveAvgPool1d(1), nn.Flatten()
        self.f1 = nn.Sequential(*pool, nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
        self.f2 = nn.Sequential(*pool, nn.Linear(width, CLASSES))

    def train(self, mode: bool = True) -> None:
        super().train(mode)

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        return self.f1(a), self.f2(self.b2(a.relu()))


def test_networks_of_signals_are_taken_over_and_saved(tmp_path: Path) -> None:
    model, x = Signals(), torch.randn(3, 2, 20)
    model.eval()
    network = attach_exits(model, x)
    assert network.fused_heads and network.taps == ("model.b1",)
    save_checkpoint(tmp_path / "net", network)
    loaded = load_checkpoint(tmp_path / "net", Signals()).network
    for got, also, want in zip(network.logits(x), loaded.logits(x), model(x), strict=True):
        torch.testing.assert_close(got, want)
        assert torch.equal(got, also)
