"""How a model returns its exits, and which is the classifier: all ways of returning, in their order."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from auxhead.model import (
    TrainingPlan,
    accelerate,
    attach_exits,
    calibrate_network,
    train,
)
from support.multi_exit_models import CLASSES, block
from support.own_exit_models import Clamped, Net, change, images, parts, variant
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


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


class OfTwo(nn.Module):
    """A head that reads two values, so that only the model can run it."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8 + 3, CLASSES)

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        return self.f(torch.cat([a.mean((2, 3)), x.mean((2, 3))], 1))


class InTurn(Net):
    """A head that is called before the next block."""

    def make(self) -> None:
        self.b0, self.h1 = block(3, 3), OfTwo()

    def forward(self, x: Tensor) -> Any:
        a = self.b1(y := self.b0(x))
        one = self.h1(a, y)
        b = self.b2(a)
        return [one, self.two(b), self.last(self.b3(b))]


def test_logits_that_a_layer_returns_before_the_next_block_are_in_time() -> None:
    fast = accelerate(InTurn().eval(), x := images(), rules=0.0)
    assert fast.network.taps == ("model.h1", "model.b2") and "its own code runs in line" in fast.report
    fast.network.backbone.model.b2.register_forward_hook(lambda *_: pytest.fail("nothing of this is wanted"))
    assert fast.network(x, stop=True).exit_index.tolist() == [0] * 4


def test_where_nothing_is_skipped_the_report_says_so_first() -> None:
    fast = accelerate(Clamped().eval(), images())
    first = fast.report.splitlines()[0]
    assert first == "Nothing is skipped behind 0, f2: in brackets, why."
    clamp = r"clamp at own_exit_models\.py:\d+"
    why = rf"{clamp} comes behind its last linear layer; and {clamp} cannot be run by itself\)"
    assert re.search(why, fast.report) and re.search(rf"not fused \({why}", fast.network.describe())


class Pyramid(Net):
    """A backbone that returns its features together, of which activations by functions are the last part."""

    def make(self) -> None:
        self.c1, self.c2 = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 12, 3, 2)
        self.features = Features()

    def forward(self, x: Tensor) -> Any:
        a, b = self.features(x, self.c1, self.c2)
        return [self.one(a), self.two(b), self.last(self.b3(b))]

    def one(self, a: Tensor) -> Tensor:
        return self.f1(a.sigmoid().amax((2, 3)))


class Features(nn.Module):
    def forward(self, x: Tensor, first: nn.Module, second: nn.Module) -> tuple[Tensor, Tensor]:
        a = F.gelu(first(x))
        return a, F.relu(second(a))


PoolsByFunctions = variant(
    parts(query=lambda: nn.Parameter(torch.randn(1, 12))),
    one=lambda net, a: Net.one(net, F.max_pool2d(a, 3, 2)),
    two=lambda net, b: net.f2(F.avg_pool2d(b, 3, 1).amax((2, 3)) * net.query.repeat(len(b), 1)),
)


@pytest.mark.parametrize(
    ("kind", "taps"),
    [(Pyramid, ("model.c1", "model.features")), (PoolsByFunctions, ("model.b1", "model.b2"))],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_heads_are_tapped_before_functions_that_are_no_layers(kind: type[Net], taps: tuple[str, str]) -> None:
    model, x = kind().eval(), images()
    network = attach_exits(model, x)
    assert network.taps == taps
    change(model)
    for _ in range(2):
        torch.testing.assert_close(network.logits(x), [*model(x)], rtol=1e-4, atol=1e-4)
        network.train(), model.train()


class Turned(Pyramid):
    """What the backbone returns last is no layer's, and no activation of one."""

    def forward(self, x: Tensor) -> Any:
        a, b = self.turned(x)
        return [self.one(a), self.last(self.c3(b) if self.goes_on else b)]

    def make(self) -> None:
        super().make()
        self.turned, self.c3 = TurnedFeatures(self.b1, self.b2, self.b3), nn.Conv2d(16, 16, 3, padding=1)

    goes_on = False


class TurnedFeatures(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.layers[0](x).flip(3)
        return a, self.layers[2](self.layers[1](a))


class TurnedFirst(Turned):
    goes_on = True


def test_a_head_that_listens_when_the_backbone_has_run_is_told_of() -> None:
    fast = accelerate(Turned().eval(), images())
    assert fast.network.taps == ("model.turned",) and "when the backbone has run" in fast.report
    assert fast.report.splitlines()[0] == "Nothing is skipped behind f1: in brackets, why."
    assert "Nothing is skipped" not in accelerate(TurnedFirst().eval(), images()).report


class WithFeatures(Net):
    """Self-distillation returns the features, too."""

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        b = self.b2(a)
        pooled = [y.mean((2, 3)) for y in (a, b, self.b3(b))]
        return [f(y) for f, y in zip((self.f1, self.f2, self.f3), pooled, strict=True)], pooled


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


#: Ways of returning exits, with their places.
RETURNED: dict[str, tuple[type[Net], list[Any]]] = {
    "main first": (variant(answers=lambda net, one, two, last: (last, [one, two])), [(1, 0), (1, 1), 0]),
    "out and aux": (
        variant(answers=lambda net, one, two, last: {"out": last, "aux": [two, one], "size": 3}),
        [("aux", 1), ("aux", 0), "out"],
    ),
    "nested": (variant(answers=lambda net, one, two, last: [[one], [two, [last]]]), [(0, 0), (1, 0), (1, 1, 0)]),
    "stacked": (variant(answers=lambda net, *said: torch.stack(said)), [0, 1, 2]),
    "stacked by cat": (
        variant(answers=lambda net, one, two, last: {"logits": torch.cat([y[:, None] for y in (last, one, two)], 1)}),
        [("logits", 1), ("logits", 2), ("logits", 0)],
    ),
    "with features": (WithFeatures, [(0, 0), (0, 1), (0, 2)]),
    "another order in training": (variant(answers=lambda net, *said: said[::-1] if net.training else said), [0, 1, 2]),
    "in training alone": (variant(answers=lambda net, *said: said if net.training else said[2]), [0, 1, 2]),
    "leaves early": (LeavesEarly, [0, 1, 2]),
}


@pytest.mark.parametrize("way", RETURNED)
def test_ways_of_returning_exits(way: str) -> None:
    kind, places = RETURNED[way]
    model = kind().eval()
    network = attach_exits(model, images())
    assert [one.place for one in network.backbone.exits] == places
    assert network.taps == ("model.b1", "model.b2") and len(network.fused_heads) == 2
    change(model)
    x, plain = images(5), Net().eval()
    plain.load_state_dict(model.state_dict())
    for _ in range(2):
        torch.testing.assert_close(network.logits(x), [*plain(x)], rtol=1e-4, atol=1e-4)
        network.train(), plain.train()


@pytest.mark.parametrize("way", ["another order in training", "in training alone", "leaves early"])
def test_all_exits_learn(way: str) -> None:
    model = RETURNED[way][0]().eval()
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


class Bag:
    """An object that holds what it likes."""


def test_a_reference_to_the_original_is_refused() -> None:
    model = Net().eval()
    model.bag = Bag()
    model.bag.layer = model.f1
    model.one = lambda a: model.bag.layer(a.mean((2, 3)))
    with pytest.raises(
        ValueError, match=r"at test_own_exits_order.py:\d+ it calls a Linear by a reference .* original's"
    ):
        attach_exits(model, images())


class HiddenBeforeTheLast(Net):
    """A costlier head than the classifier reads the same features."""

    def make(self) -> None:
        self.f2 = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        c = self.b3(self.b2(a)).mean((2, 3))
        return [self.one(a), self.f2(c), self.f3(c)]


#: Networks, with the order of the places of their exits.
DEEPEST: dict[str, tuple[type[Net], list[int]]] = {
    "the classifier, and then exits with layers of their own": (
        variant(
            parts(c1=lambda: block(8, 8), c2=lambda: block(12, 12)),
            one=lambda net, a: Net.one(net, net.c1(a)),
            two=lambda net, b: Net.two(net, net.c2(b)),
            answers=lambda net, one, two, last: (last, one, two),
        ),
        [1, 2, 0],
    ),
    "means of heads so far, of which the last block knows nothing": (
        variant(
            parts(means=lambda: nn.ModuleList([nn.Identity(), nn.Identity()])),
            answers=lambda net, one, two, last: [
                net.means[0](one * 1.0), net.means[1](torch.stack([one, two]).mean(0)), last
            ],
        ),
        [0, 1, 2],
    ),
    "a costlier head of the same features": (HiddenBeforeTheLast, [0, 1, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEPEST)
def test_the_classifier_is_the_deepest_in_the_order_of_return(name: str) -> None:
    kind, order = DEEPEST[name]
    model = kind().eval()
    network = attach_exits(model, x := images())
    assert [one.place for one in network.backbone.exits] == order
    torch.testing.assert_close(network.logits(x), [model(x)[place] for place in order])


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


class TwoHeadsOfANeck(Net):
    """Two heads share a layer of their own, beside the rest of the backbone."""

    def make(self) -> None:
        self.neck, self.f2 = nn.Conv2d(8, 8, self.size, padding=self.size // 2), nn.Linear(8, CLASSES)

    size = 1

    def forward(self, x: Tensor) -> Any:
        a = self.b1(x)
        y = self.neck(a)
        return [self.one(y), self.f2(y.amax((2, 3))), self.last(self.b3(self.b2(a)))]


class TwoHeadsOfACostlyNeck(TwoHeadsOfANeck):
    size = 5


def test_heads_that_share_layers_are_not_taken_for_the_end_of_the_backbone() -> None:
    for kind, final in ((TwoHeadsOfANeck, None), (TwoHeadsOfACostlyNeck, 2)):
        network = attach_exits(kind().eval(), images(), final=final)
        assert network.backbone.exits[-1].place == 2 and network.taps[0] == "model.neck"
    with pytest.raises(ValueError, match=r"any of its exits 0, 1, 2 may be its classifier.*wants final="):
        attach_exits(TwoHeadsOfACostlyNeck().eval(), images())


def test_the_softmax_of_logits_that_are_returned_is_no_exit() -> None:
    with_probabilities = variant(
        answers=lambda net, *said: {
            "logits": said, "probs": [y.softmax(-1) for y in said], "log": F.log_softmax(said[-1], 1)
        }
    )  # fmt: skip
    network = attach_exits(with_probabilities().eval(), images())
    assert [one.place for one in network.backbone.exits] == [("logits", place) for place in range(3)]


def test_an_exit_waits_for_no_more_than_the_exits_before_it() -> None:
    """In a cascade of whole networks, of which each reads the images."""
    cascade = variant(
        parts(c1=lambda: block(3, 8), c2=lambda: block(3, 12), c3=lambda: nn.Sequential(block(3, 12), block(12, 16))),
        forward=lambda net, x: net.answers(net.one(net.c1(x)), net.two(net.c2(x)), net.last(net.c3(x))),
    )
    network = attach_exits(cascade().eval(), images())
    assert network.taps == ("model.c1", "model.c2") and len(network.fused_heads) == 2


class Vectors(nn.Module):
    """Of linear layers alone: what is behind the last exit looks like a head with a hidden layer."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 5)
        self.second, self.last = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 5)

    def forward(self, x):
        y = self.first(x)
        return [self.head(y), self.last(self.second(y))]


def test_layers_before_the_classifier_are_the_backbones_and_are_skipped():
    fast = accelerate(Vectors().eval(), torch.randn(4, 8), rules=0.0)
    assert fast.report.startswith("Exits: head at model.first, and last, the model's own classifier.")
    ran = []
    fast.network.backbone.model.second.register_forward_hook(lambda *_: ran.append("second"))
    assert fast.network(torch.randn(4, 8), stop=True).exit_index.tolist() == [0] * 4 and ran == []
