"""Runners under patience on a GPU: exits and counts are those of heads that are called one by one."""

import pytest
import torch
from auxhead.model import make_runner
from support.example_models import needs_gpu
from support.graph_runner_cases import images, network
from support.one_by_one import one_by_one
from support.patience_cases import RULES, set_rules

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]

WAYS = {
    "eager": {"exits": "eager"},
    "overlapped": {"exits": "overlapped"},
    "polled": {"exits": "polled"},
    "gated": {"exits": "gated"},
    "compact": {"exits": "polled", "compact": True},
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_answers_are_those_of_heads_one_by_one(way, rules):
    net = network(torch.float32)
    set_rules(net, rules)
    x = images(64, torch.float32)
    # by half a percent of the samples at most two labels or a threshold are so near that rounding decides
    with make_runner(net, x[:2], batch_sizes=(1, 8, 32), **way) as runner:
        for samples in (1, 3, 8, 20, 32, 64):
            wanted, found = one_by_one(net, x[:samples]), runner(x[:samples])
            same = (found.exit_index == wanted.exit_index) & (found.label == wanted.label)
            assert (~same).sum() <= 1
            torch.testing.assert_close(found.confidence[same], wanted.confidence[same], rtol=0, atol=2e-3)
