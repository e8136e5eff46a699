"""attach_exits: heads found by what they compute, in models of many styles, and models in which they cannot be."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from auxhead.kernels import ACTIVATIONS
from auxhead.model import FusedAuxHead, attach_exits, make_runner
from auxhead.model.own_exits.silenced_model import SilencedModel, SilentLayer
from support.fingerprints import fingerprint
from support.multi_exit_models import (
    CLASSES,
    STYLES,
    InAList,
    Named,
    Perceptron,
    Pooling,
    WithoutModules,
    block,
    pool_head,
    probabilities,
)
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


def images(samples: int = 3) -> Tensor:
    return torch.randn(samples, 3, 16, 16)


def made(style: str) -> nn.Module:
    model = STYLES[style][0]().eval()
    with torch.no_grad():
        for buffer in model.buffers():  # statistics of batch norms that do something
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 2.0)
    return model


@pytest.mark.parametrize("style", STYLES)
def test_exits_are_found_and_answer_as_those_of_the_model_which_stays_as_it_is(style: str) -> None:
    model, x = made(style), images(5)
    _, found, places, last = STYLES[style]
    before, kept, random = fingerprint(model), copy.deepcopy(model), torch.get_rng_state()
    network = attach_exits(model, x[:3])
    assert torch.equal(random, torch.get_rng_state()) and fingerprint(model) == before

    assert isinstance(network.backbone, SilencedModel) and not network.training
    exits = network.backbone.exits
    assert [(one.tap, one.pool, bool(one.how)) for one in exits[:-1]] == [(f"model.{t}", *rest) for t, *rest in found]
    assert [one.place for one in exits] == places and exits[-1].head == last and exits[-1].tap == ""
    assert {one.classes for one in exits} == {CLASSES} and network.taps == tuple(one.tap for one in exits[:-1])

    wanted = probabilities(kept, style, x)
    for logits, theirs in zip(network.logits(x), wanted, strict=True):
        torch.testing.assert_close(logits.softmax(1), theirs)
    for trunk in ("as_is", "cudnn"):
        with make_runner(network, x, exits="eager", trunk=trunk) as runner:
            for place, theirs in enumerate(wanted):
                network.set_rules({tap: float(index != place) for index, tap in enumerate(network.taps)})
                answer = runner(x)
                assert answer.exit_index.tolist() == [place] * 5
                torch.testing.assert_close(answer.probs, theirs, atol=1e-5, rtol=1e-4)

    assert fingerprint(model) == before
    assert {id(p) for p in network.parameters()} <= {id(p) for p in model.parameters()}


def test_a_head_is_one_head_of_the_network_and_silent_in_its_backbone() -> None:
    model = InAList(
        pool_head(8),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Dropout(0.5), nn.Linear(192, CLASSES)),
        pool_head(16),
    ).eval()
    network = attach_exits(model, images(), rules=0.5)
    first, second = network.fused_heads
    assert first.linear.weight is model.exits[0][2].weight and (first.pool, first.dropout) == ("avg", 0.0)
    assert second.linear.weight is model.exits[1][3].weight and (second.pool, second.dropout) == ("none", 0.75)
    assert first.rule.threshold == second.rule.threshold == 0.5 and isinstance(first, FusedAuxHead)
    silent = [name for name, part in network.backbone.named_modules() if isinstance(part, SilentLayer)]
    assert silent == ["model.exits.0", "model.exits.1"]


@pytest.mark.parametrize(
    "name, activation, dtype",
    [*((*each, torch.float32) for each in ACTIVATIONS.items()), ("relu", F.relu, torch.bfloat16)],
)
def test_a_head_with_hidden_layers_is_fused_whole(name: str, activation: Any, dtype: torch.dtype) -> None:
    model = InAList(Perceptron(8, activation), Perceptron(12, activation), pool_head(16)).eval().to(dtype)
    network = attach_exits(model, images().to(dtype))
    assert network.taps == ("model.blocks.0", "model.blocks.1")
    for head, theirs in zip(network.fused_heads, model.exits, strict=False):
        assert head.linear.weight is theirs.fc.weight and head.hidden.linear.weight is theirs.hidden.weight
        assert head.hidden.norm.weight is theirs.norm.weight and head.hidden.activation == name
        assert (head.dropout, head.hidden.dropout) == pytest.approx((0.1, 0.2))


def test_a_hidden_layer_too_wide_or_with_hooks_runs_in_line() -> None:
    wide, hooked = Perceptron(8, F.relu, 1025), Perceptron(12, F.relu)
    hooked.hidden.register_forward_hook(lambda *_: None)
    model = InAList(wide, hooked, pool_head(16)).eval()
    network = attach_exits(model, images())
    assert all(bool(one.how) for one in network.backbone.exits[:-1])
    assert all(head.hidden is None for head in network.fused_heads)


def test_rules_by_tap_and_none() -> None:
    model = InAList().eval()
    network = attach_exits(model, images(), rules={"model.blocks.1": 0.25})
    assert [head.rule.threshold for head in network.fused_heads] == [1.0, 0.25]
    with pytest.raises(ValueError, match="rules: 'blocks.1' is not a tap"):
        attach_exits(model, images(), rules={"blocks.1": 0.25})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_networks_are_copied_and_pickled(copied: Callable[[nn.Module], Any]) -> None:
    x = images()
    network = attach_exits(InAList().eval(), x)
    twin = copied(network)
    assert twin.backbone.exits == network.backbone.exits
    for mine, theirs in zip(twin.logits(x), network.logits(x), strict=True):
        assert torch.equal(mine, theirs)


def test_one_sample_is_enough_and_a_batch_may_have_been_made_in_inference_mode() -> None:
    with torch.inference_mode():
        x = images(1)
        network = attach_exits(InAList().eval(), x)
    assert len(network.taps) == 2


@pytest.mark.parametrize(
    ("style", "dtype", "form"),
    [
        ("softmax layers", torch.bfloat16, torch.contiguous_format),
        ("hidden layers", torch.float16, torch.contiguous_format),
        ("classes of one's own", torch.float32, torch.channels_last),
    ],
)
def test_heads_are_found_whatever_the_dtype_and_the_memory_format(
    style: str, dtype: torch.dtype, form: torch.memory_format
) -> None:
    network = attach_exits(made(style).to(dtype).to(memory_format=form), images().to(dtype).to(memory_format=form))
    found = [(one.tap, one.pool, bool(one.how)) for one in network.backbone.exits[:-1]]
    assert found == [(f"model.{tap}", *rest) for tap, *rest in STYLES[style][1]]


def test_probabilities_that_underflow() -> None:
    model = WithoutModules().eval()
    with torch.no_grad():
        for linear in (model.fc1, model.fc2):
            linear.weight.mul_(3000.0)
    x = images()
    assert (model(x)[0] == 0).any()
    for logits, theirs in zip(attach_exits(model, x).logits(x), model(x), strict=True):
        torch.testing.assert_close(logits.softmax(1), theirs)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: x.flatten(2)[:, :, 1:].mean(2),
        lambda x: x.clamp(max=1e3).pow(3).mean((2, 3)).pow(1 / 3),
        lambda x: x.sum((2, 3)),
        lambda x: x.clamp(max=3.0).mean((2, 3)),
    ],
    ids=["all but one", "generalised mean", "sum", "clamped"],
)
def test_what_is_nearly_a_pool_is_none(pool: Callable[[Tensor], Tensor]) -> None:
    network = attach_exits(Named(in_a_list, Pooling(8, pool)).eval(), images())
    (one, _) = network.backbone.exits
    assert one.how == "its own code" and one.tap == "model.stem" and one.pool == ""


def in_a_list(*answers: Tensor) -> list[Tensor]:
    return list(answers)


class TwoForOne(nn.Module):
    """Two heads for the same features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = block(3, 8), block(8, 12)
        self.heads = nn.ModuleList([pool_head(8), pool_head(8), pool_head(12)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        return [self.heads[0](x), self.heads[1](x), self.heads[2](self.body(x))]


def test_two_heads_for_the_same_features_get_a_tap_each() -> None:
    network = attach_exits(TwoForOne().eval(), x := images())
    assert network.taps == ("model.stem.2", "model.stem")  # one tensor, by two names
    assert len(network(x).label) == 3


class Wrapped(nn.Module):
    """Another forward around a model."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.inner = model
        self.written = forward

    def forward(self, x: Tensor) -> Any:
        return self.written(self.inner, x)


class Feeds(InAList):
    """A later block is told what an earlier head said."""

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        one = self.exits[0](x)
        x = self.blocks[1](x) * (1 + one.softmax(1).amax(1))[:, None, None, None]
        return [one, self.exits[2](self.blocks[2](x))]


class Twice(InAList):
    """Runs each block twice, so that none can be a tap."""

    def forward(self, x: Tensor) -> Any:
        for layer in self.blocks:
            layer(x) if layer is self.blocks[0] else None
        return super().forward(x)


def by(forward: Callable[[nn.Module, Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Wrapped(InAList(), forward)


class ByNumpy(InAList):
    """Leaves PyTorch between two blocks, where no dispatcher sees it."""

    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        one, y = self.exits[0](x), torch.from_numpy(x.numpy())
        return [one, self.exits[2](self.blocks[2](self.blocks[1](y)))]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "one tensor": (
        by(lambda m, x: m(x)[2]),
        r"model: returned a tensor \[2, 7\] of torch.float32 at the top, in which 1 exit can be told, wants a list",
    ),
    "no exit": (by(lambda m, x: ()), "model: returned a tuple, in which no exits can be told, wants"),
    "None": (by(lambda m, x: {"a": m(x)[0], "b": None}), "model: returned a tensor .* at a, in which 1 exit"),
    "features": (
        by(lambda m, x: {"logits": m(x)[0], "features": x}),
        r"model: returned .* a tensor \[2, 3, 16, 16\] of torch.float32 at features, in which 1 exit can be told",
    ),
    "the same twice": (by(lambda m, x: [m(x)[0]] * 2), "model: returned one tensor at 0 and 1, wants one of each exit"),
    "other classes": (
        lambda: InAList(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), *later()),
        r"model: returned logits of 5 classes at 0, 7 classes at 2; wants one number of classes",
    ),
    "one class": (
        by(lambda m, x: [y[:, :1] for y in m(x)]), "model: got one logit, .* wants two: those of a linear layer"
    ),
    "training": (lambda: InAList().train(), r"model: in training mode, wants model.eval\(\)"),
    "a part in training": (lambda: partly_training(), r"model: its exits.1 is in training mode"),
    "logits that later exits add": (
        by(lambda m, x: [(y := m(x))[0], y[1], y[2] + y[0]]),
        r"model: its exit 2 depends on what its exit 0 says, by add at test_attach_exits.py:\d+"
    ),
    "logits that later layers use": (
        lambda: Feeds(), r"model: its exit 1 depends on what its exit 0 says, by _softmax at test_attach_exits.py:\d+"
    ),
    "chance": (
        by(lambda m, x: m(F.dropout(x, 0.1, training=True))),
        r"model: its exit 0 is drawn by chance, in bernoulli_ at test_attach_exits.py:\d+"
    ),
    "numpy": (lambda: ByNumpy(), r"model: the host reads a number .*, numpy\(\) at test_attach_exits.py:\d+"),
    "a batch of three": (
        by(lambda m, x: [(y := m(x))[0], y[1], y[2] * y[2] if len(x) == 3 else y[2]]),
        "model: returns, or does, something else for three samples than for two",
    ),
    "a part of TorchScript": (
        lambda: InAList(torch.jit.script(pool_head(8)), *later()),
        "model: its layer 'exits.0' is a RecursiveScriptModule",
    ),
    "compiled": (
        lambda: torch.compile(InAList().eval()), "model: is a compiled InAList, .* behind it, model._orig_mod"
    ),
}  # fmt: skip


def later() -> list[nn.Module]:
    return [pool_head(12), pool_head(16)]


def partly_training() -> nn.Module:
    model = InAList().eval()
    model.exits[1].train()
    return model


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_models_that_cannot_be_taken_apart_say_why(case: str) -> None:
    make, message = REFUSED[case]
    model = make()
    if "training" not in case:
        model.eval()
    with pytest.raises(ValueError, match=message):
        attach_exits(model, images())


def test_no_module_and_no_batch() -> None:
    with pytest.raises(TypeError, match="model: got an EarlyExitNetwork, wants a model without heads"):
        attach_exits(attach_exits(InAList().eval(), images()), images())
    with pytest.raises(TypeError, match="model: got function, wants an nn.Module"):
        attach_exits(lambda x: [x, x], images())
    with pytest.raises(TypeError, match="example: got list, wants a torch.Tensor"):
        attach_exits(InAList().eval(), [1])
    with pytest.raises(ValueError, match=r"example: got shape \[0, 3, 16, 16\], wants"):
        attach_exits(InAList().eval(), images(0))


def test_a_layer_that_runs_twice_is_no_tap() -> None:
    network = attach_exits(Twice().eval(), images())
    assert network.taps == ("model.exits.0.0", "model.blocks.1")  # the mean, within the head


def test_errors_of_the_models_own_come_through() -> None:
    with pytest.raises(RuntimeError, match="expected input"):
        attach_exits(InAList().eval(), torch.randn(2, 5, 16, 16))
