"""Networks built with earlyon, taken over with weights and rules: they answer as earlyon does, sample by sample."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from auxhead.model import EarlyExitNetwork, accelerate, attach, attach_exits, make_runner
from auxhead.model.own_exits.silenced_model import SilencedModel
from torch import Tensor, nn

models = pytest.importorskip("earlyon.models")
types = pytest.importorskip("earlyon.core.types")
wrappers = pytest.importorskip("earlyon.core.wrappers")

CLASSES = 5


class Tokens(nn.Module):
    """Tokens [N, 6, 8] through two blocks of which the second returns a tuple."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x + self.linear(x), 1

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2, self.last = nn.Linear(8, 8), self.Pair(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.block2(self.block1(x).relu())
        return self.last(y.mean(1))


def convolutions() -> nn.Sequential:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def small_head(width: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width, CLASSES))


def with_small_heads(final: Any) -> Any:
    points = [types.ExitPoint("one", "1", 8), types.ExitPoint("two", "3", 8)]
    config = types.EarlyExitConfig("custom", CLASSES, points)
    return wrappers.EarlyExitWrapper(
        convolutions(), {"two": small_head(8), "one": small_head(8)}, final, config, input_shape=(1, 3, 8, 8)
    )


#: Of each kind of network how it is made, and the shape of a sample.
KINDS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "its ResNet": (lambda: models.cifar_resnet_ee(CLASSES, depth=8), (3, 12, 12)),
    "means of tokens, of a tuple": (
        lambda: models.custom_ee(
            Tokens(), ["block1", "block2"], CLASSES, example_args=(torch.zeros(1, 6, 8),),
            feature_extractors={"block2": lambda output: output[0]}, hidden_dim=8, input_shape=(1, 6, 8),
        ),
        (6, 8),
    ),
    "class tokens": (
        lambda: models.custom_ee(
            Tokens(), ["block1"], CLASSES, example_args=(torch.zeros(1, 6, 8),), hidden_dim=8, pool_tokens="cls",
            input_shape=(1, 6, 8),
        ),
        (6, 8),
    ),
    "heads of one linear layer": (lambda: with_small_heads(nn.Linear(8, CLASSES)), (3, 8, 8)),
}  # fmt: skip


def made(kind: str, policy: str = "confidence") -> tuple[Any, Tensor]:
    """A wrapper whose exits have temperatures, and thresholds in the midst of what they say; and samples."""
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    wrapper, x = make().eval(), torch.randn(9, *shape)
    with torch.no_grad():
        for parameter in wrapper.exit_parameters():
            parameter.mul_(3.0)  # for answers of many confidences
    config = wrapper.config
    config.routing_policy = policy
    config.temperatures = {name: 0.5 + index / 4 for index, name in enumerate(config.head_names)}
    with torch.no_grad():
        said = wrapper(x, mode="training")
    for index, name in enumerate(config.head_names[:-1]):
        probs = (said[index] / config.temperatures[name]).softmax(1)
        config.confidence_thresholds[index] = between(probs.amax(1), 3)
        config.entropy_thresholds[index] = between(-(probs * probs.log()).sum(1), 5)
    return wrapper, x


def between(values: Tensor, place: int) -> float:
    """A number between two of some, so that rounding decides nothing."""
    ordered = values.sort(descending=True).values
    return ordered[place : place + 2].double().mean().item()


def check_answers(network: EarlyExitNetwork, wrapper: Any, x: Tensor) -> list[int]:
    """Compare with what earlyon says of each sample alone; returns the exits."""
    answer, exits = network(x), []
    for index, sample in enumerate(x):
        theirs = wrapper(sample[None], mode="inference")
        exits.append(theirs.exit_taken if theirs.exit_taken >= 0 else len(network.taps))
        assert answer.exit_index[index] == exits[-1] and answer.label[index] == theirs.prediction.argmax()
        assert answer.probs[index].max().item() == pytest.approx(theirs.confidence, abs=1e-5)
    return exits


@pytest.mark.parametrize(("kind", "policy"), list(zip(KINDS, ["confidence", "entropy"] * 2, strict=True)))
def test_answers_are_those_of_earlyon(kind: str, policy: str) -> None:
    wrapper, x = made(kind, policy)
    network = attach_exits(wrapper, x)
    assert len(set(check_answers(network, wrapper, x))) > 1
    *heads, last = wrapper(x, mode="training")
    torch.testing.assert_close(network.logits(x), [*heads, last / wrapper.config.temperatures["final"]])
    assert {id(parameter) for parameter in network.parameters()} == {id(one) for one in wrapper.parameters()}
    with make_runner(network, x, exits="eager", trunk="as_is") as runner:
        assert runner(x).exit_index.equal(network(x).exit_index)


def test_the_wrapper_stays_as_it_is() -> None:
    wrapper, x = made("its ResNet")
    hooks = {name: list(layer._forward_hooks) for name, layer in wrapper.named_modules()}
    before, parameters = wrapper(x, mode="training"), copy.deepcopy(wrapper.state_dict())
    network = attach_exits(wrapper, x).train()
    assert not any(layer.training for layer in wrapper.modules())
    assert {name: list(layer._forward_hooks) for name, layer in wrapper.named_modules()} == hooks
    assert all(torch.equal(value, parameters[name]) for name, value in wrapper.state_dict().items())
    assert all(map(torch.equal, before, wrapper(x, mode="training")))
    assert not any(layer._forward_hooks for layer in network.modules())


def test_heads_of_one_linear_layer_are_fused_whole_behind_the_same_layers() -> None:
    wrapper, x = made("heads of one linear layer")
    network = attach_exits(wrapper, x)
    assert network.taps == ("backbone.1", "backbone.3")  # behind the backbone there is a step of the wrapper's
    wrapper = with_small_heads(lambda logits: logits)
    wrapper.backbone.append(nn.Linear(8, CLASSES))
    wrapper.config.confidence_thresholds = [0.22, 0.21]
    network = attach_exits(wrapper.eval(), x)
    assert network.taps == ("1", "3") and list(network.backbone.state_dict()) == list(wrapper.backbone.state_dict())
    first = network.fused_heads[0]
    assert first.linear.weight is wrapper.exit_heads["one"][3].weight and first.dropout == pytest.approx(0.1)
    check_answers(network, wrapper, x)


def test_exits_that_are_disabled_or_always_taken_and_a_confidence_at_the_threshold() -> None:
    wrapper, x = made("heads of one linear layer")
    with torch.no_grad():
        for parameter in wrapper.exit_parameters():
            parameter.zero_()  # each class has a fifth
    config = wrapper.config
    config.confidence_thresholds = [0.2, 0.0]
    assert check_answers(attach_exits(wrapper, x), wrapper, x) == [0] * 9
    config.enabled_exits = [False, True]
    assert check_answers(attach_exits(wrapper, x), wrapper, x) == [1] * 9
    config.confidence_thresholds = [0.2, 0.2000001]
    assert check_answers(attach_exits(wrapper, x), wrapper, x) == [2] * 9
    config.routing_policy, config.entropy_thresholds = "entropy", [0.0, math.log(CLASSES) + 0.1]
    assert check_answers(attach_exits(wrapper, x), wrapper, x) == [1] * 9


@pytest.mark.usefixtures("without_interpreter")
def test_it_is_accelerated_attached_copied_and_pickled() -> None:
    wrapper, x = made("its ResNet")
    wanted = attach_exits(wrapper, x)(x).exit_index
    fast = accelerate(wrapper, x)
    assert fast(x).exit_index.equal(wanted) and "the model's own logits" in fast.report
    for network in (attach(wrapper, example_input=x), copy.deepcopy(fast.network), pickled(fast.network)):
        assert network(x).exit_index.equal(wanted)


def pickled(network: EarlyExitNetwork) -> EarlyExitNetwork:
    loaded: EarlyExitNetwork = pickle.loads(pickle.dumps(network))
    return loaded


def test_what_it_does_not_know_it_refuses() -> None:
    wrapper, x = made("its ResNet")
    with pytest.raises(ValueError, match=r"model: in training mode, wants model.eval\(\)"):
        attach_exits(wrapper.train(), x)
    wrapper.eval().config.routing_policy = "patience"
    wrapper.config.validate = lambda: None  # of a later version, that knows more
    with pytest.raises(ValueError, match="model: routes by 'patience', wants 'confidence' or 'entropy'"):
        attach_exits(wrapper, x)


def test_its_own_heads_are_fused_whole() -> None:
    wrapper, x = made("its ResNet")
    network = attach_exits(wrapper, x)
    assert network.taps == ("backbone.stage1", "backbone.stage2", "backbone.stage3")
    for head, theirs in zip(network.fused_heads, wrapper.exit_heads.values(), strict=True):
        first, _, drop, last = theirs.classifier
        assert head.hidden.linear is not None and head.hidden.linear.weight is first.weight
        assert head.linear.weight is last.weight and head.hidden.activation == "relu"
        assert head.dropout == 0.0 and head.hidden.dropout == pytest.approx(drop.p)


def test_a_hidden_layer_too_wide_to_be_fused_runs_in_line() -> None:
    wrapper, x = models.cifar_resnet_ee(CLASSES, depth=8), torch.randn(4, 3, 12, 12)
    for head in wrapper.exit_heads.values():
        head.classifier[0] = nn.Linear(head.classifier[0].in_features, 1025)
        head.classifier[3] = nn.Linear(1025, CLASSES)
    network = attach_exits(wrapper.eval(), x)
    assert isinstance(network.backbone, SilencedModel) and len(network.fused_heads) == 3
    check_answers(network, wrapper, x)
