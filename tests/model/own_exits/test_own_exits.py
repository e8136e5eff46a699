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
from support.own_exit_models import Clamped, MaskOfSamples, Net, change, exits, images, pooled, seeded
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

pytestmark = pytest.mark.usefixtures("without_interpreter")


class LogitScale(Net):
    def make(self) -> None:
        self.g = nn.Parameter(torch.ones(1))

    def one(self, a: Tensor) -> Tensor:
        return super().one(a) * self.g


class FeatureScale(Net):
    def make(self) -> None:
        self.g = nn.Parameter(torch.ones(8))

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.mean((2, 3)) * self.g)


class Gate(Net):
    """A second way to the logits, closed at first."""

    def make(self) -> None:
        self.g, self.other = nn.Parameter(torch.zeros(1)), nn.Linear(8, CLASSES)

    def one(self, a: Tensor) -> Tensor:
        return super().one(a) + self.g * self.other(a.amax((2, 3)))


class Attention(Net):
    """A pool by a query that is zero at first, and so a mean."""

    def make(self) -> None:
        self.query = nn.Parameter(torch.zeros(8))

    def one(self, a: Tensor) -> Tensor:
        tokens = a.flatten(2).transpose(1, 2)
        weights = (tokens @ self.query).softmax(1)
        return self.f1((tokens * weights[..., None]).sum(1))


class Temperature(Net):
    def make(self) -> None:
        self.T = 1.0

    def one(self, a: Tensor) -> Tensor:
        return super().one(a) / self.T


class TiedWeights(Net):
    def make(self) -> None:
        self.f2 = nn.Linear(8, CLASSES)
        self.f2.weight = self.f1.weight

    def two(self, b: Tensor) -> Tensor:
        return self.f2(b[:, :8].mean((2, 3)))


class NormalisedWeight(Net):
    def make(self) -> None:
        parametrizations.weight_norm(self.f1)
        parametrizations.spectral_norm(self.f2)


class Pruned(Net):
    def make(self) -> None:
        prune.l1_unstructured(self.f1, "weight", 0.5)


class Hooked(Net):
    def make(self) -> None:
        self.f1.register_forward_hook(lambda _m, _x, y: 3.0 * y)
        self.f2.register_forward_pre_hook(lambda _m, x: F.normalize(x[0], dim=1))


class OwnForward(Net):
    def make(self) -> None:
        self.f1.forward = self.tripled

    def tripled(self, x: Tensor) -> Tensor:
        return 3.0 * F.linear(x, self.f1.weight, self.f1.bias)


class Subclassed(Net):
    def make(self) -> None:
        class Cosine(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1), self.bias)

        self.f1 = Cosine(8, CLASSES)


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


class FoldedInPlace(Net):
    """Logits gathered in a buffer that is written part by part."""

    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return torch.stack([one, two, last], 1)


class Rectified(Net):
    def make(self) -> None:
        self.b1 = self.b1[:2]

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.relu().mean((2, 3)))


class Functional(Net):
    """A head with a hidden layer, a norm and dropout, by functions."""

    def make(self) -> None:
        self.norm, self.hidden = nn.LayerNorm(8), nn.Linear(8, 8)

    def one(self, a: Tensor) -> Tensor:
        y = F.gelu(self.hidden(F.dropout(self.norm(a.mean((2, 3))), 0.1, self.training)))
        return self.f1(F.dropout(y, 0.3, self.training))


class Convolutional(Net):
    """Heads with convolutions, a batch norm and dropout of maps."""

    def make(self) -> None:
        self.c1, self.c2 = block(8, 8), nn.Sequential(nn.Conv2d(12, 12, 1), nn.Dropout2d(0.2))

    def one(self, a: Tensor) -> Tensor:
        return self.f1(self.c1(a).mean((2, 3)))

    def two(self, b: Tensor) -> Tensor:
        return self.f2(self.c2(b).amax((2, 3)))


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


TAKEN: list[type[Net]] = [
    Net, LogitScale, FeatureScale, Gate, Attention, Clamped, Temperature, TiedWeights, NormalisedWeight, Pruned, Hooked,
    OwnForward, Subclassed, InPlaceAfterwards, FoldedInPlace, Rectified, Functional, Convolutional, InADict,
]  # fmt: skip


def test_other_masks_are_no_dropout() -> None:
    heads = attach_exits(MaskOfSamples().eval(), images()).fused_heads
    assert not heads


class Sigmoids(Net):
    """Says of each class whether it is there, whatever it says of others."""

    def one(self, a: Tensor) -> Tensor:
        return super().one(a).sigmoid()


def test_sigmoids_are_no_logits() -> None:
    with pytest.raises(ValueError, match=r"exit 0 is a sigmoid, .* at test_own_exits.py:\d+; wants logits"):
        attach_exits(Sigmoids().eval(), images())


class ReadsAParameter(Net):
    def make(self) -> None:
        self.g = nn.Parameter(torch.ones(1))

    def one(self, a: Tensor) -> Tensor:
        return super().one(a) if self.g > 0 else self.f1(a.amax((2, 3)))


def test_a_parameter_that_the_host_reads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"depends on the parameters, .* at test_own_exits.py:\d+"):
        attach_exits(ReadsAParameter().eval(), images())


@pytest.mark.parametrize("kind", TAKEN, ids=lambda kind: kind.__name__)
def test_what_is_taken_over_stays_right_in_both_modes(kind: type[Net]) -> None:
    model = kind().eval()
    network = attach_exits(model, images())
    for later in (lambda: None, lambda: change(model)):
        later()
        if hasattr(model, "T"):
            network.backbone.model.T = model.T  # of the copy, in line
        for x in (images(), 30 * images(7)):
            for got, want in zip(network.logits(x), exits(model(x)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    reference = kind()
    reference.load_state_dict(model.state_dict())
    reference.T = 0.5  # which one kind reads
    network.train(), reference.train()
    x = images(6)
    for mine, its in zip(seeded(lambda: network.logits(x)), seeded(lambda: exits(reference(x))), strict=True):
        assert mine.shape == its.shape and mine.requires_grad
        if kind in (Net, LogitScale, Gate, Rectified, Clamped, Temperature, FoldedInPlace, InADict):  # no dropout
            torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    assert not any(part.training for part in model.modules())


def test_what_is_fused_and_what_is_not() -> None:
    fused = {kind: attach_exits(kind().eval(), images()).fused_heads for kind in TAKEN}
    whole = {Net, FoldedInPlace, Rectified, Functional, InADict}
    assert {kind for kind, heads in fused.items() if len(heads) == 2} == whole
    assert fused[Functional][0].dropout == pytest.approx(0.1)
    assert fused[Functional][0].hidden.dropout == pytest.approx(0.3)
    assert fused[Rectified][0].hidden.rectifies


class Compiled(Net):
    def make(self) -> None:
        self.b2.compile(backend="eager")


def test_compiled_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="its layer 'b2' is a compiled Sequential, .* wants the module behind it"):
        attach_exits(Compiled().eval(), images())


class OneLogit(Net):
    """A binary classifier, whose logits a sigmoid is to read."""

    def make(self) -> None:
        self.f1, self.f2, self.f3 = nn.Linear(8, 1), nn.Linear(12, 1), nn.Linear(16, 1)


class Binary(OneLogit):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return last


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


def test_heads_are_taken_over_whatever_the_dtype_and_the_memory_format() -> None:
    for dtype, form in ((torch.bfloat16, torch.contiguous_format), (torch.float32, torch.channels_last)):
        model = Net().to(dtype).to(memory_format=form).eval()
        x = images().to(dtype).to(memory_format=form)
        network = attach_exits(model, x)
        assert all(isinstance(head, FusedAuxHead) for head in network.heads) and network.taps == (
            "model.b1",
            "model.b2",
        )


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
