"""Rules of a model's own, batches of other sizes and encoders: taken over, or refused with what to write."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from auxhead.model import (
    EarlyExitNetwork,
    accelerate,
    attach_exits,
)
from support.multi_exit_models import CLASSES
from support.own_exit_models import Halved, Net, change, images, parameter, parts, seeded, variant
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


class WrittenPartByPart(Net):
    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        said = torch.empty(len(one), 3, CLASSES)
        for place, y in enumerate((one, two, last)):
            said[:, place] = y
        return said


def test_an_order_of_return_that_changes_later_is_refused() -> None:
    turned = variant(answers=lambda net, *said: said if len(said[0]) < 20 else said[::-1])
    network = attach_exits(turned().eval(), images())
    assert len(network(images(19)).label) == 19
    for call in (network, network.logits, network.train().logits):
        with pytest.raises(ValueError, match="at 2 what another exit says, for a batch of 20, .* in one order"):
            call(images(20))


class InAThread(Net):
    def one(self, a: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as threads:
            return super().one(threads.submit(torch.tanh, a).result())


OF_ITS_SIZE = variant(one=lambda net, a: Net.one(net, 2 * a if len(a) == 1 or len(a) > 6 else a))


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
    torch.testing.assert_close(network.logits(x), [*Net.forward(model, x)])


class LeavesWithOneSample(Net):
    """All exits of a batch, and of one sample those that its own rule leaves."""

    def forward(self, x: Tensor) -> Any:
        one = self.one(a := self.b1(x))
        if not self.training and len(x) == 1 and one.softmax(1).amax() > self.rule:
            return [one] * 3
        b = self.b2(a)
        return [one, self.two(b), self.last(self.b3(b))]

    rule = 0.99


def test_a_rule_that_a_batch_alone_does_not_ask_is_replaced() -> None:
    model = LeavesWithOneSample().eval()
    network = attach_exits(model, images())
    model.rule = network.backbone.model.rule = 0.0
    x = images(1)
    torch.testing.assert_close(network.logits(x), [*Net.forward(model, x)])


class Left(Exception):
    pass


class Encoder(nn.Module):
    """Layers that all end in a head, and leave early by an exception, for batches of one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Sequential(nn.Dropout(0.3), nn.Linear(8, CLASSES)) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        said = []
        for layer, head in zip(self.layers, [*self.heads, None], strict=True):
            x = layer(x).tanh()
            said += [(head(x[:, 0]), x)] if head is not None else []
            if not self.training and said[-1][0].amax(1) > 0.9:
                raise Left(said[-1])
        return x, {"early": said}


class Text(nn.Module):
    """ids [N, T] or ids and mask -> logits, and what its encoder says before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.encoder, self.last = nn.Embedding(9, 8), Encoder(), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Any:
        x = self.embed(ids) if mask is None else self.embed(ids) * mask[..., None]
        try:
            x, said = self.encoder(x)
        except Left as left:
            return left.args[0][0], {}
        return self.last(x.amax(1)), said


def said_in_training(model: nn.Module, *given: Tensor) -> list[Tensor]:
    """What a ``Text`` says at each exit without dropout: in training mode, with dropout in eval mode."""
    model.train()
    for layer in (each for each in model.modules() if isinstance(each, nn.Dropout)):
        layer.eval()
    last, said = model(*given)
    model.eval()
    return [*(y for y, _ in said["early"]), last]


def test_a_rule_within_an_encoder_is_replaced() -> None:
    model, ids = Text().eval(), torch.randint(9, (4, 5))
    network = attach_exits(model, ids)
    assert [one.place for one in network.backbone.exits] == [(1, "early", 0, 0), (1, "early", 1, 0), 0]
    change(model)
    torch.testing.assert_close(network.logits(ids), [*said_in_training(model, ids)])
    assert not any(layer.training for layer in network.modules())
    reference = Text()
    reference.load_state_dict(model.state_dict())
    network.train()
    last, said = seeded(lambda: reference(ids))
    for got, want in zip(seeded(lambda: network.logits(ids)), [*(y for y, _ in said["early"]), last], strict=True):
        assert (got == 0).equal(want == 0) and got.requires_grad


def test_several_arguments_go_into_one_tensor() -> None:
    model, ids = Text().eval(), torch.randint(9, (4, 5))
    mask = (torch.arange(5) < torch.tensor([[5], [3], [4], [1]])).long()
    network = attach_exits(OfOneTensor(model).eval(), x := torch.stack([ids, mask], 1))
    for door in (attach_exits, accelerate):
        with pytest.raises(TypeError, match=r"example: got dict, wants a torch.Tensor \[N, ...\]"):
            door(model, {"ids": ids, "mask": mask})
    torch.testing.assert_close(network.logits(x), [*said_in_training(model, ids, mask)])


class OfOneTensor(nn.Module):
    """What errors ask for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(ids=x[:, 0], mask=x[:, 1])


class LeavesByRow(Net):
    """In eval mode each sample has the logits of the first exit that is sure."""

    def answers(self, one: Tensor, two: Tensor, last: Tensor) -> Any:
        if self.training:
            return [one, two, last]
        one, two, last = (each.softmax(1) for each in (one, two, last))
        return torch.where(one.amax(1, keepdim=True) > 0.3, one, torch.where(two[:, :1] > 0.1, two, last))


def test_what_eval_mode_alone_says_is_one_of_the_exits() -> None:
    model, x = LeavesByRow().eval(), images()
    network = attach_exits(model, x)
    model.training = True  # without its layers
    torch.testing.assert_close(network.logits(x), [*model(x)])


class OfOneSampleAlone(OfOneSample):
    def forward(self, x: Tensor) -> Any:
        one = self.one(self.b1(x))
        return one if one.amax().item() > -99 else self.last(self.b3(self.b2(self.b1(x))))


class TrainsWithArguments(OfOneSampleAlone):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x * self.scale if self.training else x)  # type: ignore[operator]


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


class Cast(Net):
    """Runs under an autocast of its own."""

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_layers_under_an_autocast_of_the_models_stay_there() -> None:
    model, x = Cast().eval(), images()
    network = attach_exits(model, x)
    assert not network.fused_heads
    for got, want in zip(network.logits(x), model(x), strict=True):
        assert torch.equal(got, want)


class TokensFirst(Net):
    """Tokens come before samples, and are as many as those that are recorded."""

    def make(self) -> None:
        self.e1, self.e2, self.f1, self.f2 = (nn.Linear(6, width) for width in (6, 6, CLASSES, CLASSES))

    def forward(self, x: Tensor) -> Any:
        a = self.e1(x.transpose(0, 1))
        b = self.e2(a)
        return self.f1(a[0]), self.f2(b.mean(0))


def test_tokens_are_not_taken_for_samples() -> None:
    model, x = TokensFirst().eval(), torch.randn(4, 2, 6)
    torch.testing.assert_close(attach_exits(model, x).logits(x), [*model(x)])


MEAN = variant(answers=lambda net, *said: list(said) if net.training else sum(said) / 3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrittenPartByPart, "in which no exits can be told"),
        (OF_ITS_SIZE, "for a batch of 1; wants exits that compute the same .* for batches of all sizes"),
        (InAThread, r"does not depend on the input, or not by .* in one thread.*write EarlyExitNetwork\(model"),
        (MEAN, "what it returns in eval mode is what none of the exits says .*wants a module"),
        (OfOneSampleAlone, r"the host reads a number .* at test_own_exits_modes.py:\d+"),
        (TrainsWithArguments, r"the host reads.*; as in training mode it raises AttributeError\(.*'scale'"),
        (
            variant(lambda net: setattr(net, "late", nn.LazyLinear(3))),
            r"'late.weight' has no shape before a first batch; wants model\(example\)",
        ),
        (  # no line that would turn the order around
            variant(answers=lambda net, one, two, last: (one, two + 0 * one, last)),
            "its exit 1 depends on what its exit 0 says.* put the network together by",
        ),
        (
            variant(answers=lambda net, *said: torch.stack(said).softmax(2)),
            r"\[3, 2, 7\] .* at the top, made by _softmax at test_own_exits_modes.py:\d+",
        ),
        (
            variant(one=lambda net, a: Net.one(net, a).sigmoid()),
            r"exit 0 is a sigmoid, .* at test_own_exits_modes.py:\d+; wants logits",
        ),
        (
            variant(parts(g=parameter(1)), one=lambda net, a: net.f1(a.mean((2, 3)) if net.g > 0 else a.amax((2, 3)))),
            r"depends on the parameters, .* at test_own_exits_modes.py:\d+",
        ),
        (
            variant(lambda net: net.b2.compile(backend="eager")),
            "its layer 'b2' is a compiled Sequential, .* wants the module behind it",
        ),
    ],
)
def test_refusals_say_what_was_read_and_what_to_write(kind: type[Net], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attach_exits(kind().eval(), images())
