"""Exits that were taken over learn as in the model: gradients go where its own go, and attaching changes nothing."""

import random
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.nn.functional as F
from auxhead.model import attach_exits
from auxhead.model.listening.recorder import record
from support.multi_exit_models import CLASSES, block
from support.own_exit_models import Halved, MaskOfSamples, Net, exits, images, parts, seeded, variant
from torch import Tensor, fx, nn
from torch.nn.utils import prune

pytestmark = pytest.mark.usefixtures("without_interpreter")


class Detached(Net):
    """The first head learns on features that it does not change, without gradients or as others call it."""

    def one(self, a: Tensor) -> Tensor:
        return super().one(a.detach())

    def two(self, b: Tensor) -> Tensor:
        with torch.no_grad():
            y = b.mean((2, 3))
        return self.f2(y)


class Pair(NamedTuple):
    layer: nn.Module
    number: int


class ByAFunction(Net):
    """Layers, and their mode, that functions and collections of all kinds hold."""

    def make(self) -> None:
        self.drop = lambda y: F.dropout(y, 1.0, self.training)
        self.b1.forward = lambda x, layers=list(self.b1): layers[2](layers[1](layers[0](x)))
        self.pair, self.waiting, self.me = Pair(self.f1, 3), deque([self.b2]), weakref.ref(self)
        self.b3.register_forward_pre_hook(lambda _m, x: (self.drop(x[0]),))

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.waiting[0](a)
        return [self.pair.layer(F.dropout(a.mean((2, 3)), 1.0, self.me().training)), self.two(b), self.last(self.b3(b))]


class ByAHook(Net):
    """Features that hooks put into a dict of the model's."""

    def make(self) -> None:
        features = self.features = {}
        self.b1.register_forward_hook(lambda _m, _x, y: features.update(a=y))

    def forward(self, x: Tensor) -> Any:
        b = self.b2(self.b1(x))
        return [self.one(self.features["a"]), self.two(b), self.last(self.b3(b))]


class Backwards(torch.autograd.Function):
    """Turns a gradient around."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


class BackwardHooks(Net):
    """Of a layer whose output is a head's, and of a tensor."""

    def make(self) -> None:
        self.b1.register_full_backward_hook(lambda _m, _x, _y: None)
        self.b2.register_full_backward_hook(lambda _m, x, _y: (2.0 * x[0],))

    def one(self, a: Tensor) -> Tensor:
        y = a.mean((2, 3))
        if y.requires_grad:
            y.register_hook(lambda grad: 3.0 * grad)
        return self.f1(y)


class HookedAfterwards(Net):
    """A hook on what a head has read already."""

    def one(self, a: Tensor) -> Tensor:
        y = a.mean((2, 3))
        said = self.f1(y)
        if y.requires_grad:
            y.register_hook(lambda grad: 3.0 * grad)
        return said


class Counting(nn.Module):
    """A head that keeps a number of its own, which its logits do not need."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, CLASSES), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, a: Tensor) -> Tensor:
        if self.training:
            self.seen += len(a)
        return self.linear(a.mean((2, 3)))


class Normed(Counting):
    def forward(self, a: Tensor) -> Any:
        super().forward(a)
        return self.linear(self.norm(a.mean((2, 3)))), 1


class BlockTwice(Net):
    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.same(a)
        return self.f1(a.mean((2, 3))), self.f1(b.mean((2, 3))), self.f1(self.same(b).mean((2, 3)))

    def make(self) -> None:
        self.same = nn.Conv2d(8, 8, 3, padding=1)


class HeadsPartCalledElsewhere(Net):
    """What a head is made of runs, or tells something, outside of it."""

    def make(self) -> None:
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
        self.f1.factor = 2.0

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.mean((2, 3)).view(-1, self.f1.in_features))

    def two(self, b: Tensor) -> Tensor:
        return self.f2(self.head[1](self.head[0](b)))

    def last(self, c: Tensor) -> Tensor:
        return super().last(c) * self.f1.factor


class Centred(Net):
    """A head that subtracts a mean of features that the model itself keeps, by tensors alone."""

    def make(self) -> None:
        for name, value in (("mean", torch.zeros(8)), ("keep", torch.tensor(0.9)), ("rate", torch.tensor(0.1))):
            self.register_buffer(name, value)

    def one(self, a: Tensor) -> Tensor:
        y = a.mean((2, 3))
        if self.training:
            self.mean.mul_(self.keep)
            self.mean.add_(y.detach().mean(0) * self.rate)
        return self.f1(y - self.mean)


class CentredBefore(Centred):
    def one(self, a: Tensor) -> Tensor:
        y = a.mean((2, 3))
        said = self.f1(y - self.mean)
        if self.training:
            self.mean.lerp_(y.detach().mean(0), self.rate)
        return said


class Minus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, y: Tensor) -> Tensor:
        return y - self.mean


class CentredByALayer(Net):
    """The layer that reads what the model writes to is called whole."""

    def make(self) -> None:
        self.centre = Minus()

    def one(self, a: Tensor) -> Tensor:
        said = self.f1(self.centre(y := a.mean((2, 3))))
        if self.training:
            self.centre.mean.lerp_(y.detach().mean(0), 0.1)
        return said


class CountsAnswers(Net):
    def make(self) -> None:
        self.register_buffer("said", torch.zeros(CLASSES))

    def one(self, a: Tensor) -> Tensor:
        y = super().one(a)
        if self.training:
            self.said.mul_(0.9)
            self.said += y.detach().softmax(1).mean(0)
        return y


class WeightDecays(Net):
    def one(self, a: Tensor) -> Tensor:
        y = super().one(a)
        if self.training:
            self.f1.weight.data.mul_(0.5)
        return y


class Keeping(Net):
    """Changes buffers, in place and not, a list, and the states of generators."""

    def make(self) -> None:
        self.register_buffer("m", torch.zeros(8))
        self.register_buffer("n", torch.zeros(()))
        self.seen: list[int] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.n += 1
        self.seen.append(len(x))
        self.calls += 1
        if self.training:
            self.m = self.m + self.b1(x).mean((0, 2, 3)).detach()
            x = x * (1.0 + random.random() * numpy.random.rand())
        return super().forward(x)

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.mean((2, 3)) - self.m)


def test_attaching_changes_nothing_of_a_model_or_a_generator() -> None:
    model, x = Keeping().eval(), images()
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    network = attach_exits(model, x)
    assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    for one in (model, network.backbone.model):
        assert (one.n, one.calls, one.seen) == (0, 0, []) and not one.m.any()
    with pytest.raises(ValueError, match="draws numbers by Python's random or by NumPy in training mode"):
        network.train()


class WritesItsWeights(Net):
    def one(self, a: Tensor) -> Tensor:
        self.f1.weight.data.mul_(0.5)
        return super().one(a)

    def two(self, b: Tensor) -> Tensor:
        if self.training:
            self.f2.weight.data = self.f2.weight.data * 0.5
        return super().two(b)


def test_parameters_that_a_forward_writes_to_are_put_back() -> None:
    model = WritesItsWeights().eval()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    attach_exits(model, images())
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())


class Replaces(Centred):
    """Puts another tensor in place of its buffer, which the model that shares the old one would not see."""

    def one(self, a: Tensor) -> Tensor:
        y = a.mean((2, 3))
        if self.training:
            self.mean = self.mean * self.keep + y.detach().mean(0) * self.rate
        return self.f1(y - self.mean)


def test_a_buffer_that_a_forward_replaces_is_refused_in_its_mode() -> None:
    network = attach_exits(Replaces().eval(), images())
    with pytest.raises(ValueError, match=r"another tensor in place of its 'mean' in training mode.*self.mean.copy_\("):
        network.train()


class Stopped(Net):
    """Heads that teach the backbone nothing, or half of it; the next block reads the same features."""

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.mean((2, 3)).detach())

    def two(self, b: Tensor) -> Tensor:
        return self.f2(Halved.apply(b).mean((2, 3)))


class StoppedBehind(Stopped):
    def two(self, b: Tensor) -> Tensor:
        return Halved.apply(super().two(b))

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.b2(a)
        c = self.b3(b)
        return torch.stack([self.one(a), self.two(b), self.last(c)], 1)


class StoppedBeside(Net):
    """What is detached of the features is not what the head reads."""

    def one(self, a: Tensor) -> Tensor:
        self.seen = a.detach()
        return super().one(a)


LEARN: dict[str, type[Net]] = {
    **{kind.__name__: kind for kind in (
        Net, Detached, Centred, CentredBefore, CentredByALayer, CountsAnswers, WeightDecays, ByAFunction, ByAHook,
        MaskOfSamples, BackwardHooks, HookedAfterwards, BlockTwice, HeadsPartCalledElsewhere, Stopped, StoppedBehind,
        StoppedBeside,
    )},
    "gradients halved on their way back": variant(one=lambda net, a: Net.one(net, Halved.apply(a))),
    "a graph of fx": variant(lambda net: setattr(net, "b1", fx.symbolic_trace(net.b1))),
    "a backward of its own": variant(
        one=lambda net, a: net.f1(Backwards.apply(a).mean((2, 3))), two=lambda net, b: Backwards.apply(Net.two(net, b))
    ),
    "a head that counts": variant(parts(head=Counting), one=lambda net, a: net.head(a)),
    "a head that counts, in a tuple": variant(parts(head=Normed), one=lambda net, a: net.head(a)[0]),
    "one norm behind all blocks": variant(
        parts(
            b2=lambda: block(8, 8), b3=lambda: block(8, 8), neck=lambda: nn.BatchNorm2d(8),
            f2=lambda: nn.Linear(8, CLASSES), f3=lambda: nn.Linear(8, CLASSES),
        ),
        one=lambda net, a: net.f1(net.neck(a).mean((2, 3))),
        two=lambda net, b: net.f2(net.neck(b).mean((2, 3))),
        last=lambda net, c: net.f3(net.neck(c).mean((2, 3))),
    ),
    "channels in another order": variant(one=lambda net, a: net.f1(a[:, [1, 0, 3, 2, 5, 4, 7, 6]].mean((2, 3)))),
    "a pruned bias": variant(lambda net: prune.random_unstructured(net.f1, "bias", 0.5)),
}  # fmt: skip


@pytest.mark.parametrize("name", LEARN)
def test_what_is_taken_over_learns_as_it_did(name: str) -> None:
    model, reference = LEARN[name]().eval(), LEARN[name]()
    network = attach_exits(model, images())
    reference.load_state_dict(model.state_dict())
    x, weights = images(6), torch.randn(6, CLASSES)
    network.train(), reference.train()
    answers = [seeded(lambda: network.logits(x)), seeded(lambda: exits(reference(x)))]
    for mine, its in zip(*answers, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
        grads = [
            torch.autograd.grad((y * weights).sum(), list(of.parameters()), retain_graph=True, allow_unused=True)
            for y, of in ((mine, model), (its, reference))
        ]
        for (its_name, _), got, want in zip(model.named_parameters(), *grads, strict=True):
            assert (got is None or not got.any()) == (want is None or not want.any()), its_name
            if got is not None and want is not None:
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, msg=its_name)
    for (its_name, mine), its in zip(model.named_buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4, msg=its_name)
    assert not any(part.training for part in model.modules())


class SharedWeights(Net):
    """Heads that are rows of one weight, which each of them takes by a view that changes nothing."""

    def make(self) -> None:
        self.w = nn.Parameter(torch.randn(2, 16, CLASSES))

    def head(self, y: Tensor, row: int) -> Tensor:
        y = F.pad(y.mean((2, 3)), (0, 16 - y.shape[1]))
        return (y @ self.w.view(2, 16, CLASSES))[row]

    def one(self, a: Tensor) -> Tensor:
        return self.head(a, 0)

    def two(self, b: Tensor) -> Tensor:
        return self.head(b, 1)


def test_a_view_of_all_of_a_parameter_is_that_parameter() -> None:
    recording = record(SharedWeights().eval(), images())
    views = [each for each in recording.operations if each.name == "view" and each.makes[0].shape == (2, 16, CLASSES)]
    assert len(views) > 1 and all(each.reads[0].names == ["w"] for each in views)
    attach_exits(SharedWeights().eval(), images()).train()
