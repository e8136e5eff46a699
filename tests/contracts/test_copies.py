"""copy, deepcopy, pickle and state_dicts: a copy answers the same, and changing it leaves the original alone."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from auxhead.kernels import LaunchConfig
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead, HeadOutput
from support.example_models import SmallNet, plain_heads
from torch import nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


def through_torch_save(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": through_torch_save,
}


@pytest.fixture(params=COPIES)
def copied(request: pytest.FixtureRequest) -> Callable:
    return COPIES[request.param]


def network() -> EarlyExitNetwork:
    torch.manual_seed(0)
    return EarlyExitNetwork(SmallNet(), plain_heads(), ExitRule(0.6, temperature=1.5)).eval()


def assert_agrees(rule: ExitRule, threshold: float, temperature: float, *, enabled: bool = True) -> None:
    """What the host says is what the kernel reads."""
    assert (rule.threshold, rule.temperature, rule.enabled) == (threshold, temperature, enabled)
    on_device = threshold if enabled else 1.0
    assert torch.equal(rule.threshold_tensor, torch.tensor(on_device))
    assert torch.equal(rule.temperature_tensor, torch.tensor(temperature))


@pytest.mark.parametrize(
    "way",
    [*COPIES.values(), copy.copy],
    ids=[*COPIES, "copy"],
)
def test_a_copied_rule_is_another_rule(way: Callable) -> None:
    rule = ExitRule(0.7, temperature=1.3, enabled=False)
    other = way(rule)
    assert_agrees(other, 0.7, 1.3, enabled=False)
    other.threshold, other.temperature, other.enabled = 0.2, 4.0, True
    assert_agrees(other, 0.2, 4.0)
    assert_agrees(rule, 0.7, 1.3, enabled=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_a_copied_rule_is_float32_whatever_the_default_dtype(dtype: torch.dtype, copied: Callable) -> None:
    default, head, x = torch.get_default_dtype(), FusedAuxHead(6, 5, rule=0.7), torch.randn(3, 6)
    torch.set_default_dtype(dtype)
    try:
        other = copied(head)
    finally:
        torch.set_default_dtype(default)
    assert_agrees(other.rule, 0.7, 1.0)
    assert all(torch.equal(one, two) for one, two in zip(other(x), head(x), strict=True))


@pytest.mark.parametrize("in_features", [6, None], ids=["sized", "lazy"])
def test_a_copied_head_is_another_head(in_features: int | None, copied: Callable) -> None:
    head = FusedAuxHead(in_features, 5, pool="max", pool_size=(1, 2), rule=ExitRule(0.25, temperature=1.5)).eval()
    other, x = copied(head), torch.randn(3, 3, 4, 4)
    if in_features is None:
        assert isinstance(other.linear, nn.LazyLinear)
        other(x)
        assert isinstance(head.linear, nn.LazyLinear), "the width of a copy is its own"
        return
    wanted = head(x)
    assert all(torch.equal(one, two) for one, two in zip(other(x), wanted, strict=True))
    other.rule.assign(ExitRule(0.0, temperature=9.0))
    with torch.no_grad():
        other.linear.weight.zero_()
    assert_agrees(head.rule, 0.25, 1.5)
    assert all(torch.equal(one, two) for one, two in zip(head(x), wanted, strict=True))
    assert other(x).exit.all() and not torch.equal(other(x).probs, wanted.probs)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_copied_network_is_another_network(checked: bool, copied: Callable) -> None:
    net, x = network(), torch.randn(5, 3, 8, 8)
    if checked:
        net.check_taps(x)
    other = copied(net)
    wanted = net(x)
    assert all(torch.equal(one, two) for one, two in zip(other(x), wanted, strict=True))
    other.set_rules(0.0)
    with torch.no_grad():
        other.backbone.fc.weight.zero_()
    assert all(torch.equal(one, two) for one, two in zip(net(x), wanted, strict=True))
    assert other(x).exit_index.tolist() == [0] * 5 != wanted.exit_index.tolist()


def test_a_shallow_copy_shares_all_modules_as_everywhere_in_pytorch() -> None:
    """Rules included, whole: what one says of itself is what the other does."""
    head = FusedAuxHead(6, 5, rule=0.7)
    other = copy.copy(head)
    other.rule.threshold = 0.2
    assert other.linear is head.linear
    assert_agrees(head.rule, 0.2, 1.0)
    net = network()
    copy.copy(net).set_rules(0.3)
    for of_net in net.heads:
        assert_agrees(of_net.rule, 0.3, 1.5)


def test_answers_and_choices_are_copied_whole(copied: Callable) -> None:
    net, x = network(), torch.randn(3, 3, 8, 8)
    with torch.no_grad():
        answers = [net(x), FusedAuxHead(3, 5, return_probs=False)(x)]
    for answer in answers:
        other = copied(answer)
        assert type(other) is type(answer)
        for name, one, two in zip(answer._fields, answer, other, strict=True):
            assert (one is None) == (two is None), name
            assert one is None or (torch.equal(one, two) and one.data_ptr() != two.data_ptr()), name
    assert isinstance(answers[1], HeadOutput) and answers[1].probs is None
    config = LaunchConfig(1, 16, 1, 16, 1, 16, 2, 16, 1, stages=1, num_warps=4, max_programs=8)
    other = copied(config)
    assert isinstance(other, LaunchConfig) and other == config and hash(other) == hash(config)


def test_a_state_is_loaded_without_unpickling_code() -> None:
    net, other, file = network(), EarlyExitNetwork(SmallNet(), plain_heads()).eval(), io.BytesIO()
    net.set_rules({"block1": ExitRule(0.3, temperature=2.0, enabled=False)})
    torch.save(net.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(5, 3, 8, 8)
    assert all(torch.equal(one, two) for one, two in zip(other(x), net(x), strict=True))
    assert_agrees(other.heads[1].rule, 0.3, 2.0, enabled=False)
