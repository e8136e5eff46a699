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
    TrainingPlan,
    accelerate,
    attach_exits,
    calibrate_network,
    load_checkpoint,
    save_checkpoint,
    train,
)
from support.multi_exit_models import CLASSES, block
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

pytestmark = pytest.mark.usefixtures("without_interpreter")


def images(samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 16, 16)


class Net(nn.Module):
    """Two blocks and a third; heads, and what is returned, by methods that others replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b1, self.b2, self.b3 = block(3, 8), block(8, 12), block(12, 16)
        self.f1, self.f2, self.f3 = nn.Linear(8, CLASSES), nn.Linear(12, CLASSES), nn.Linear(16, CLASSES)
        self.make()

    def make(self) -> None:
        pass

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.mean((2, 3)))

    def two(self, b: Tensor) -> Tensor:
        return self.f2(b.mean((2, 3)))

    def last(self, c: Tensor) -> Tensor:
        return self.f3(c.mean((2, 3)))

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.b2(a)
        return self.answers(self.one(a), self.two(b), self.last(self.b3(b)))

    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return [one, two, last]


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


class Clamped(Net):
    def one(self, a: Tensor) -> Tensor:
        return super().one(a).clamp(-1, 1)


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


class Detached(Net):
    """The first head learns on features that it does not change, without gradients or as others call it."""

    def one(self, a: Tensor) -> Tensor:
        return super().one(a.detach())

    def two(self, b: Tensor) -> Tensor:
        with torch.no_grad():
            y = b.mean((2, 3))
        return self.f2(y)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


class ScaledBack(Net):
    """The gradients of its first head are halved on their way back."""

    def one(self, a: Tensor) -> Tensor:
        return super().one(Halved.apply(a))


@pytest.mark.parametrize("kind", [Net, Detached, ScaledBack], ids=lambda kind: kind.__name__)
def test_gradients_are_the_models_own(kind: type[Net]) -> None:
    model, reference, x = kind().eval(), kind(), images(6)
    reference.load_state_dict(model.state_dict())
    network = attach_exits(model, x).train()
    for mine, its in zip(network.logits(x), reference(x), strict=True):
        model.zero_grad(), reference.zero_grad()
        mine.square().sum().backward(retain_graph=True)
        its.square().sum().backward(retain_graph=True)
        for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            if one.grad is None or other.grad is None:
                assert all(each.grad is None or not each.grad.any() for each in (one, other)), name
            else:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4, msg=name)


class MaskOfSamples(Net):
    """Drops whole samples, and the same features in two layers: no dropout that heads know."""

    def one(self, a: Tensor) -> Tensor:
        y = a.mean((2, 3))
        return self.f1(y * torch.empty(len(y), 1).bernoulli_(0.5).div_(0.5) if self.training else y)

    def two(self, b: Tensor) -> Tensor:
        y = b.mean((2, 3))
        if self.training:
            mask = torch.empty_like(y).bernoulli_(0.5).div_(0.5)
            y = y * mask * mask
        return self.f2(y)


def test_other_masks_are_no_dropout() -> None:
    heads = attach_exits(MaskOfSamples().eval(), images()).fused_heads
    assert not heads


class ReadsAParameter(Net):
    def make(self) -> None:
        self.g = nn.Parameter(torch.ones(1))

    def one(self, a: Tensor) -> Tensor:
        return super().one(a) if self.g > 0 else self.f1(a.amax((2, 3)))


def test_a_parameter_that_the_host_reads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"depends on the parameters, .* at test_own_exits.py:\d+"):
        attach_exits(ReadsAParameter().eval(), images())


def change(model: nn.Module) -> None:
    """Make something else of all that may become something else."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.2, 1.5) if tensor.ndim < 2 else tensor.normal_()
    if hasattr(model, "T"):
        model.T = 0.5


def exits(answers: Any) -> list[Tensor]:
    return list(answers.unbind(1)) if isinstance(answers, Tensor) else list(answers)


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


def seeded(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    torch.manual_seed(1)
    return run()


def test_what_is_fused_and_what_is_not() -> None:
    fused = {kind: attach_exits(kind().eval(), images()).fused_heads for kind in TAKEN}
    whole = {Net, FoldedInPlace, Rectified, Functional, InADict}
    assert {kind for kind, heads in fused.items() if len(heads) == 2} == whole
    assert fused[Functional][0].dropout == pytest.approx(0.1)
    assert fused[Functional][0].hidden.dropout == pytest.approx(0.3)
    assert fused[Rectified][0].hidden.rectifies


class Behind(Net):
    """Heads, with layers of their own, called when all blocks have run."""

    def make(self) -> None:
        self.p1, self.p2 = nn.Conv2d(8, 16, 1), nn.Conv2d(12, 16, 1)
        self.f1, self.f2 = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.b2(a)
        c = self.b3(b)
        one, two, last = (y.mean((2, 3)) for y in (self.p1(a), self.p2(b), c))
        return self.f1(one), self.f2(two), self.f3(last)


def test_heads_called_behind_the_backbone_are_tapped_where_they_leave_it() -> None:
    model = Behind().eval()
    fast = accelerate(model, x := images(), rules=0.0)
    assert fast.network.taps == ("model.b1", "model.b2") and [e.place for e in fast.network.backbone.exits] == [0, 1, 2]
    ran: list[str] = []
    for name in ("b1", "b2", "b3", "p2"):
        layer = fast.network.backbone.model.get_submodule(name)
        layer.register_forward_hook(lambda *_, name=name: ran.append(name))
    assert fast.network(x, stop=True).exit_index.tolist() == [0] * 4 and ran == ["b1"]
    data = [(images(40), torch.randint(CLASSES, (40,))) for _ in range(3)]
    report = calibrate_network(fast.network, data, max_accuracy_drop=0.2, confidence=0.6)
    work = [one.work for one in report.exits]
    assert 0 < work[0] < work[1] < work[2] == 1.0


def test_where_nothing_is_skipped_the_report_says_so_first() -> None:
    fast = accelerate(Clamped().eval(), images())
    first = fast.report.splitlines()[0]
    assert first == "Nothing is skipped behind 0, f2: see below." and "clamp at test_own_exits.py" in fast.report


class MainFirst(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return last, [one, two]


class OutAndAux(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return {"out": last, "aux": [two, one], "size": 3}


class Nested(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return [[one], [two, [last]]]


class Stacked(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return torch.stack([one, two, last])


class StackedByCat(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return {"logits": torch.cat([y[:, None] for y in (last, one, two)], 1)}


class WithFeatures(Net):
    """Self-distillation returns the features, too."""

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.b2(a)
        pooled = [y.mean((2, 3)) for y in (a, b, self.b3(b))]
        return [f(y) for f, y in zip((self.f1, self.f2, self.f3), pooled, strict=True)], pooled


class OtherOrderInTraining(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return (last, two, one) if self.training else (one, two, last)


class InTrainingAlone(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return [one, two, last] if self.training else last


class LeavesEarly(Net):
    """By a rule of its own, in eval mode."""

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        one = self.one(a)
        if not self.training and one.softmax(1).amax() > 0.3:
            return one
        b = self.b2(a)
        two = self.two(b)
        if not self.training and two.softmax(1).amax() > 0.3:
            return two
        last = self.last(self.b3(b))
        return [one, two, last] if self.training else last


RETURNED: dict[type[Net], list[Any]] = {
    MainFirst: [(1, 0), (1, 1), 0],
    OutAndAux: [("aux", 1), ("aux", 0), "out"],
    Nested: [(0, 0), (1, 0), (1, 1, 0)],
    Stacked: [0, 1, 2],
    StackedByCat: [("logits", 1), ("logits", 2), ("logits", 0)],
    WithFeatures: [(0, 0), (0, 1), (0, 2)],
    OtherOrderInTraining: [0, 1, 2],
    InTrainingAlone: [0, 1, 2],
    LeavesEarly: [0, 1, 2],
}


@pytest.mark.parametrize("kind", RETURNED, ids=lambda kind: kind.__name__)
def test_ways_of_returning_exits(kind: type[Net]) -> None:
    model = kind().eval()
    network = attach_exits(model, images())
    assert [one.place for one in network.backbone.exits] == RETURNED[kind]
    assert network.taps == ("model.b1", "model.b2") and len(network.fused_heads) == 2
    change(model)
    x, plain = images(5), Net().eval()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        for got, want in zip(network.logits(x), plain(x), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        network.train(), plain.train()


@pytest.mark.parametrize("kind", [OtherOrderInTraining, InTrainingAlone, LeavesEarly], ids=lambda kind: kind.__name__)
def test_all_exits_learn(kind: type[Net]) -> None:
    model = kind().eval()
    network = attach_exits(model, images())
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    train(network, [(images(16), torch.randint(CLASSES, (16,))) for _ in range(3)], TrainingPlan("joint", epochs=1))
    assert not [name for name, each in model.named_parameters() if torch.equal(each, before[name])]


class Targets(Net):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        if self.training and y is None:
            raise ValueError("no targets")
        return super().forward(x)


def test_a_mode_of_which_nothing_is_known_is_refused_when_it_is_set() -> None:
    network = attach_exits(Targets().eval(), x := images())
    assert len(network(x).label) == 4
    with pytest.raises(ValueError, match="in training mode it raises .*no targets.*train the model itself"):
        network.train()
    assert not any(part.training for part in network.modules())


class Alike(Net):
    """Two branches of equal work leave the last shared value, and neither is a head that can be fused."""

    def make(self) -> None:
        self.left, self.right = block(12, 16), block(12, 16)
        self.f2 = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Any:
        b = self.b2(self.b1(x))
        return {"a": self.f3(self.right(b).mean((2, 3))), "b": self.f2(self.wide(self.left(b)).mean((2, 3)))}

    def wide(self, y: Tensor) -> Tensor:
        return y


class Wider(Alike):
    """The one returned first does more."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return {"b": y["b"], "a": y["a"]}

    def make(self) -> None:
        super().make()
        self.more = nn.Conv2d(16, 16, 3, padding=1)

    def wide(self, y: Tensor) -> Tensor:
        return self.more(y)


def test_two_deepest_exits_are_told_apart_by_their_order_or_asked_for() -> None:
    assert [one.place for one in attach_exits(Alike().eval(), images()).backbone.exits] == ["a", "b"]
    with pytest.raises(ValueError, match="any of its exits 'b', 'a' may be its classifier.*wants final='b'"):
        attach_exits(Wider().eval(), images())
    for final, order in (("b", ["a", "b"]), ("a", ["b", "a"])):
        network = attach_exits(Wider().eval(), images(), final=final)
        assert [one.place for one in network.backbone.exits] == order
    with pytest.raises(ValueError, match=r"final: got 'c', wants one of \['b', 'a'\]"):
        attach_exits(Wider().eval(), images(), final="c")


def test_a_closure_over_the_original_is_refused() -> None:
    model = Net().eval()
    model.b1.forward = lambda x, layers=list(model.b1): layers[2](layers[1](layers[0](x)))
    with pytest.raises(ValueError, match=r"at test_own_exits.py:\d+ it calls a Conv2d by a reference .* original's"):
        attach_exits(model, images())


def test_heads_are_taken_over_whatever_the_dtype_and_the_memory_format() -> None:
    for dtype, form in ((torch.bfloat16, torch.contiguous_format), (torch.float32, torch.channels_last)):
        model = Net().to(dtype).to(memory_format=form).eval()
        x = images().to(dtype).to(memory_format=form)
        network = attach_exits(model, x)
        assert all(isinstance(head, FusedAuxHead) for head in network.heads) and network.taps == (
            "model.b1",
            "model.b2",
        )


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
        return torch.stack([self.one(a), self.two(b), self.last(c)])


class StoppedBeside(Net):
    """What is detached of the features is not what the head reads."""

    def one(self, a: Tensor) -> Tensor:
        self.seen = a.detach()
        return super().one(a)


@pytest.mark.parametrize("kind", [Stopped, StoppedBehind, StoppedBeside], ids=lambda kind: kind.__name__)
def test_what_heads_hand_back_is_as_in_the_model(kind: type[Net]) -> None:
    model, reference, x = kind().eval(), kind().train(), images(6)
    network = attach_exits(model, x).train()
    for mine, its in zip(network.logits(x), reference(x), strict=True):
        torch.testing.assert_close(mine, its)
        grads = [torch.autograd.grad(y.square().sum(), m.parameters(), allow_unused=True, retain_graph=True)
                 for y, m in ((mine, model), (its, reference))]  # fmt: skip
        for (name, _), one, other in zip(model.named_parameters(), *grads, strict=True):
            assert (one is None or not one.any()) == (other is None or not other.any()), name
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)


class FinalFirst(Net):
    """The classifier, and then exits with layers of their own from the shallowest on."""

    def make(self) -> None:
        self.c1, self.c2 = block(8, 8), block(12, 12)

    def one(self, a: Tensor) -> Tensor:
        return super().one(self.c1(a))

    def two(self, b: Tensor) -> Tensor:
        return super().two(self.c2(b))

    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return last, one, two


class MeansSoFar(Net):
    """Exits that are means of heads so far, of which the last block knows nothing."""

    def make(self) -> None:
        self.means = nn.ModuleList([nn.Identity(), nn.Identity()])

    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        return [self.means[0](one * 1.0), self.means[1](torch.stack([one, two]).mean(0)), last]


class HiddenBeforeTheLast(Net):
    """A costlier head than the classifier reads the same features."""

    def make(self) -> None:
        self.f2 = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        c = self.b3(self.b2(a)).mean((2, 3))
        return [self.one(a), self.f2(c), self.f3(c)]


@pytest.mark.parametrize(
    ("kind", "order"),
    [(FinalFirst, [1, 2, 0]), (MeansSoFar, [0, 1, 2]), (HiddenBeforeTheLast, [0, 1, 2])],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_the_classifier_is_the_deepest_in_the_order_of_return(kind: type[Net], order: list[int]) -> None:
    model = kind().eval()
    network = attach_exits(model, x := images())
    assert [one.place for one in network.backbone.exits] == order
    for got, want in zip(network.logits(x), [model(x)[place] for place in order], strict=True):
        torch.testing.assert_close(got, want)


class ExitOnTheLast(Net):
    """An exit with a convolution on what the classifier reads plainly: depth and order of return disagree."""

    def make(self) -> None:
        self.c3, self.f2 = block(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        c = self.b3(self.b2(a))
        return [self.one(a), self.f2(self.c3(c).mean((2, 3))), self.last(c)]


def test_an_exit_that_does_more_than_the_last_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"any of its exits 1, 2 may be its classifier.*wants final=2"):
        attach_exits(ExitOnTheLast().eval(), images())
    network = attach_exits(ExitOnTheLast().eval(), images(), final=2)
    assert [one.place for one in network.backbone.exits] == [0, 1, 2]


class OfOneSample(Net):
    """Leaves early by a learned confidence, in a way that batches of one alone survive; training returns those, too."""

    def make(self) -> None:
        self.g = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        one, sure = self.one(a), self.g(a.mean((2, 3))).sigmoid()
        if not self.training and sure.item() > 0.5:
            return one, 0
        b = self.b2(a)
        two, last = self.two(b), self.last(self.b3(b))
        return ([one, two, last], [sure]) if self.training else (last, 2)


def test_a_rule_for_batches_of_one_is_replaced() -> None:
    model = OfOneSample().eval()
    network = attach_exits(model, x := images())
    assert [one.place for one in network.backbone.exits] == [(0, 0), (0, 1), (0, 2)]
    for got, want in zip(network.logits(x), Net.forward(model, x), strict=True):
        torch.testing.assert_close(got, want)


class OfOneSampleAlone(OfOneSample):
    def forward(self, x: Tensor) -> Any:
        one = self.one(self.b1(x))
        return one if one.amax().item() > -99 else self.last(self.b3(self.b2(self.b1(x))))


def test_refusals_say_what_was_read_and_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"the host reads a number .* at test_own_exits.py:\d+"):
        attach_exits(OfOneSampleAlone().eval(), images())
    with pytest.raises(ValueError, match=r"'late.weight' has no shape before a first batch; wants model\(example\)"):
        lazy = Net()
        lazy.late = nn.LazyLinear(3)
        attach_exits(lazy.eval(), images())


class Cascade(Net):
    """Each exit reads what the one before it says."""

    def make(self) -> None:
        self.f2 = nn.Linear(12 + CLASSES, CLASSES)

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        one = self.one(a)
        b = self.b2(a)
        two = self.f2(torch.cat([b.mean((2, 3)), one.softmax(1)], 1))
        self.said = one.detach()
        return {"one": one, "two": two, "last": self.last(self.b3(b))}


class SaysDetached(Cascade):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y | {"one": Halved.apply(y["one"].detach())}


@pytest.mark.parametrize("kind", [Cascade, SaysDetached], ids=lambda kind: kind.__name__)
def test_the_line_that_a_refusal_names_makes_the_network(kind: type[Net]) -> None:
    model, x = kind().eval(), images()
    with pytest.raises(
        ValueError, match=r"its exit 'two' depends on what its exit 'one' says, by _softmax at"
    ) as error:
        attach_exits(model, x)
    line = str(error.value).rpartition("write ")[2]
    network = eval(line, {"EarlyExitNetwork": EarlyExitNetwork, "nn": nn, "model": model}).eval()
    for got, want in zip(network.logits(x), model(x).values(), strict=True):
        assert torch.equal(got, want)


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
