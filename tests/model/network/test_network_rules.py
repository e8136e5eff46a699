"""Exit rules of a network: given to all heads or by tap, as rules or as thresholds."""

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitRule, FusedAuxHead
from support.example_models import SmallNet, plain_heads

pytestmark = pytest.mark.usefixtures("without_interpreter")


def images(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 8, 8) * torch.rand(samples, 1, 1, 1) * 3


def network(rules: object) -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet(), plain_heads(), rules).eval()


def test_rules_by_number_rule_or_tap() -> None:
    rule = ExitRule(0.5, temperature=2.0)
    net = network(rule)
    assert [head.rule.threshold for head in net.heads] == [0.5] * 3
    net.heads[0].rule.threshold = 0.25
    assert rule.threshold == net.heads[1].rule.threshold == 0.5 and net.heads[2].rule.temperature == 2.0
    net.set_rules({"block1": 0.1, "block2": ExitRule(0.2, enabled=False)})
    assert [head.rule.threshold for head in net.heads] == [0.25, 0.1, 0.2] and not net.heads[2].rule.enabled
    own = EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5, rule=0.4)})
    assert own.heads[0].rule.threshold == 0.4


def test_a_number_changes_the_threshold_alone() -> None:
    net = network({"block0": ExitRule(0.5, temperature=2.0), "block1": ExitRule(0.5, enabled=False), "block2": 0.5})
    net.set_rules(0.4)
    net.set_rules({"block0": 0.3})
    rules = [head.rule for head in net.fused_heads]
    assert [rule.threshold for rule in rules] == [0.3, 0.4, 0.4]
    assert [rule.temperature for rule in rules] == [2.0, 1.0, 1.0]
    assert [rule.enabled for rule in rules] == [True, False, True]
    assert [rule.threshold_tensor.item() for rule in rules] == pytest.approx([0.3, 1.0, 0.4])


@pytest.mark.parametrize(("criterion", "threshold"), [("energy", -7.5), ("patience", 2.0)])
def test_a_number_is_a_threshold_for_the_criterion_that_a_head_has(criterion: str, threshold: float) -> None:
    net = network({"block1": ExitRule(criterion=criterion)})
    net.set_rules({"block1": threshold})
    assert [head.rule.threshold for head in net.fused_heads] == [1.0, threshold, 1.0]
    with pytest.raises(ValueError, match=rf"^threshold: got {threshold}, wants a number in \[0.0, 1.0\]"):
        net.set_rules(threshold)  # which is none for the others
    assert [head.rule.threshold for head in net.fused_heads] == [1.0, threshold, 1.0]


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"block9": 0.5}, r"^rules: 'block9'.*block0"),
        ({"block0": 0.3, "block9": 0.5}, r"^rules: 'block9'"),
        (1.5, "^threshold: got 1.5"),
        ({"block0": -1.0}, "^threshold: got"),
        ("sure", r"^rules: got str, wants an ExitRule or a threshold \(a float\)"),
        ([0.5, 0.6, 0.7], "^rules: got list, wants an ExitRule or a threshold .*, or a dict of them by tap"),
        (torch.tensor(0.5), "^rules: got Tensor"),
        ({"block0": None}, r"^rules\['block0'\]: got NoneType, wants an ExitRule or a threshold \(a float\)$"),
        ({"block0": ExitRule}, r"^rules\['block0'\]: got the class ExitRule"),
    ],
    ids=str,
)
def test_bad_rules_are_named_and_change_nothing(rules: object, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        network(rules)
    net = network(0.6)
    with pytest.raises((ValueError, TypeError), match=match):
        net.set_rules(rules)
    assert [head.rule.threshold for head in net.heads] == [0.6] * 3


def test_a_changed_rule_takes_effect_at_once() -> None:
    net, x = network(1.0), images(4)
    assert net(x).exit_index.eq(3).all()
    net.heads[1].rule.threshold = 0.0
    assert net(x).exit_index.eq(1).all()
    net.heads[1].rule.enabled = False
    assert net(x).exit_index.eq(3).all()


def test_a_rule_for_several_heads_is_copied_for_each() -> None:
    rule = ExitRule(0.7, temperature=1.5)
    taps = list(plain_heads())
    heads = {tap: FusedAuxHead(None, 5, rule=rule) for tap in taps}
    net = EarlyExitNetwork(SmallNet(), heads, example_input=images(2))
    net.set_rules({taps[0]: 0.2})
    assert [head.rule.threshold for head in net.fused_heads] == [0.2] + [0.7] * (len(taps) - 1)
    assert rule.threshold == 0.7 and {head.rule.temperature for head in net.fused_heads} == {1.5}
