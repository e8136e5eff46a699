"""Naive early exit, the "before" of a profile: the answers of the eager runner, and really leaving."""

import pytest
import torch
from auxhead.model import EagerRunner, EarlyExitNetwork, ExitResult, ExitRule
from auxhead.model.agreement import ROUNDING, Agreement, agreement
from auxhead.model.naive_forward import NaiveForward
from example_models import SmallNet, plain_heads

pytestmark = pytest.mark.usefixtures("without_interpreter")


def network_and_batch(samples, thresholds=(0.6, 0.7, 0.8)):
    network = EarlyExitNetwork(SmallNet(), plain_heads()).eval()
    x = torch.randn(samples, 3, 16, 16)
    network.check_taps(x)
    network.set_rules(dict(zip(SmallNet.taps, thresholds, strict=True)))
    return network, x


def blocks_run(backbone):
    ran = []
    for tap in SmallNet.taps:
        backbone.get_submodule(tap).register_forward_pre_hook(lambda *_, tap=tap: ran.append(tap))
    return ran


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_it_answers_as_the_eager_runner(samples):
    network, x = network_and_batch(samples)
    network.set_rules({"block1": ExitRule(0.7, temperature=1.7)})
    naive = NaiveForward(network)
    for scale in (0.1, 1.0, 3.0, 1.0):
        found, wanted = naive(scale * x), EagerRunner(network)(scale * x)
        assert torch.equal(found.label, wanted.label) and torch.equal(found.exit_index, wanted.exit_index)
        torch.testing.assert_close(found.confidence, wanted.confidence)
        torch.testing.assert_close(found.probs, wanted.probs)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(("thresholds", "blocks"), [((0, 1, 1), 1), ((1, 0, 1), 2), ((1, 1, 0), 3), ((1, 1, 1), 3)])
def test_it_leaves_once_all_are_sure(samples, thresholds, blocks):
    network, x = network_and_batch(samples, thresholds)
    naive = NaiveForward(network)
    ran = blocks_run(naive._backbone)
    found = naive(x)
    assert ran == list(SmallNet.taps[:blocks])
    assert found.exit_index.tolist() == [thresholds.index(0) if 0 in thresholds else 3] * samples


def test_a_disabled_exit_lets_nobody_go():
    network, x = network_and_batch(2, (0.0, 0.0, 1.0))
    network.heads[0].rule.enabled = False
    assert NaiveForward(network)(x).exit_index.tolist() == [1, 1]


def test_the_network_stays_as_it_is():
    network, x = network_and_batch(2)
    naive = NaiveForward(network)
    ran = blocks_run(network.backbone)
    naive(x)
    assert ran == [] and not network.backbone.block0._forward_hooks


def result(labels, exits, confidences, probs=None):
    probs = None if probs is None else torch.tensor(probs)
    return ExitResult(torch.tensor(labels), torch.tensor(confidences), probs, torch.tensor(exits))


def test_agreement_excuses_what_rounding_decides():
    near, far = 0.8 + ROUNDING / 2, 0.8 + 2 * ROUNDING
    wanted = result([1, 1, 1, 1], [0, 0, 1, 2], [near, far, 0.9, 0.9])
    assert agreement(wanted, wanted, [0.8, 0.8]) == Agreement(4, 0, 0)
    later = result([1, 1, 1, 1], [1, 1, 1, 2], [0.9, 0.9, 0.9, 0.9])
    assert agreement(later, wanted, [0.8, 0.8]) == agreement(wanted, later, [0.8, 0.8]) == Agreement(2, 1, 1)
    # the same exit, another label: excused if the two labels are as good as equally likely
    wanted = result([0, 0], [1, 1], [0.5, 0.6], [[0.5, 0.495, 0.005], [0.6, 0.3, 0.1]])
    assert agreement(result([1, 1], [1, 1], [0.5, 0.6]), wanted, [0.8]) == Agreement(0, 1, 1)
