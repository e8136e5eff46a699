"""Networks under patience answer as a plain loop over their heads' labels: eagerly, planned, saved, calibrated."""

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import EarlyExitNetwork, ExitMonitor, ExitRule
from auxhead.model.auto.pass_times import exits_of
from auxhead.model.calibration.thresholds import exit_indices, exit_scores
from support.exits_plan_cases import as_on_a_gpu, heads_called, images, make_network
from support.patience_cases import RULES, assert_answers, set_rules

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture
def network() -> EarlyExitNetwork:
    """Heads of one network agree about some samples: they read alike what the layers before them have made alike."""
    net = make_network()
    with torch.no_grad():
        for head in net.fused_heads[1:]:
            head.linear.weight.copy_(net.fused_heads[0].linear.weight * 0.7 + head.linear.weight * 0.3)
            head.linear.bias.zero_()
        net.backbone.second.weight.copy_(torch.eye(2)[:, :, None, None])
        net.backbone.third.weight.copy_(torch.eye(2)[:, :, None, None])
    return net


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_eager_passes_count_heads_that_agree(network, rules):
    set_rules(network, rules)
    x = images(40)
    assert_answers(network(x), network, x, rules)
    assert_answers(network.double()(x.double()), network, x.double(), rules)
    network.float()
    for one in x.split(1):
        assert_answers(network(one, stop=True), network, one, rules)


def test_a_forward_is_left_where_all_agree(network):
    reached = []
    network.backbone.third.register_forward_hook(lambda *_: reached.append(True))
    network.set_rules(ExitRule(1, criterion="patience"))
    x = images(40)
    x = x[network(x).exit_index == 1]
    reached.clear()
    assert network(x, stop=True).exit_index.eq(1).all() and not reached


@pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here")
@pytest.mark.parametrize(("rules", "stop"), [*zip(RULES.values(), [True, False] * 3, strict=False)], ids=[*RULES])
def test_planned_launches_count_them(network, rules, stop):
    set_rules(network, rules)
    network.monitor = ExitMonitor([0.25] * 4, 100)
    x = images(8)
    for batch in (x[:3], x[3:6], x[6:], x[:3]):
        with as_on_a_gpu(), heads_called() as called:
            found = network(batch, stop=stop)
        assert not called, "heads were called one by one"
        assert_answers(found, network, batch, rules)
    assert network.monitor.counts().sum() == 11


def test_a_head_that_cannot_tell_agrees_with_none(network):
    with torch.no_grad():
        network.fused_heads[1].linear.bias[0] = torch.nan
    network.set_rules({network.taps[2]: ExitRule(1, criterion="patience"), network.taps[0]: 1.0, network.taps[1]: 1.0})
    assert network(images(20)).exit_index.eq(3).all(), "the third head begins anew"
    network.set_rules({network.taps[1]: ExitRule(0, criterion="patience"), network.taps[2]: ExitRule(1.0)})
    assert network(images(20)).exit_index.eq(3).all(), "the second one exits nobody"


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_plans_and_calibration_see_the_same_exits(network, rules):
    set_rules(network, rules)
    x = images(40)
    wanted = network(x).exit_index
    assert torch.equal(exits_of(network, [x])[0], wanted)
    with torch.no_grad():
        logits = torch.stack(network.logits(x)[:-1])
    scores = exit_scores(logits, [rule.criterion for rule in rules], [rule.temperature for rule in rules])
    thresholds = torch.tensor([head.rule.threshold_tensor.item() for head in network.fused_heads])
    assert torch.equal(exit_indices(scores, thresholds), wanted)


@pytest.mark.parametrize("threshold", [-1, -0.5, float("nan"), float("inf"), 1e39])
def test_a_threshold_that_is_no_patience_is_refused(threshold):
    with pytest.raises(ValueError, match=r"threshold: got .*, wants a number in \[0.0, .* for criterion 'patience'"):
        ExitRule(threshold, criterion="patience")
