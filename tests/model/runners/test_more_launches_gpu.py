"""Graph runners whose heads a library multiplies, or whose features are packed before: each way answers as eager."""

from collections.abc import Sequence

import pytest
import torch
from auxhead.model import EarlyExitNetwork, make_trunk
from auxhead.model.runners.graph_runner import GraphRunner
from support.example_models import needs_gpu
from support.graph_runner_cases import (
    WAYS,
    assert_same,
    assert_takes_no_memory,
    images,
    made,
    near_a_decision,
    network,
)
from torch import Tensor

pytestmark = [
    *needs_gpu,
    pytest.mark.usefixtures("repeatable", "stops_at_every_tap", "every_move_pays", "not_by_one_launch"),
]
#: A head of one layer, and one with all that is done for it.
HEADS = {"linear": {}, "deeper": {"hidden_features": 24, "pool": "max", "pool_size": 2}}
#: Of confidences: also hidden features are rounded, and batches of other sizes are multiplied in other orders.
TOLERANCE = 2e-2


def network_of(head: str) -> EarlyExitNetwork:
    """A network whose heads let half of the samples leave: hidden features have a mean that outweighs all else."""
    net, x = network(**HEADS[head]), images(64)
    with torch.no_grad():
        for one, logits in zip(net.heads, net.logits(x), strict=False):
            one.linear.bias -= logits.mean(0)
        for one, logits in zip(net.heads, net.logits(x), strict=False):
            one.rule.threshold = torch.softmax(logits.float(), 1).amax(1).median().item()
    return net


def check(net: EarlyExitNetwork, runner: GraphRunner, x: Tensor, sizes: Sequence[int]) -> None:
    """Compare batches of the first samples with eager heads, but for samples within rounding of a decision."""
    near = near_a_decision(net, make_trunk(net.backbone, net.taps, x[:2]), x, 3 * TOLERANCE)
    assert near.float().mean() <= 0.5, "too much would be excused"
    for samples in sizes:
        wanted, found = net(x[:samples]), runner(x[:samples])
        assert_same(found, wanted, TOLERANCE, near[:samples])
        assert_same(runner(x[:samples]), found, 0.0)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_answers_as_eager(way: str, head: str, not_by_one_launch: str) -> None:
    """By the parameters as they are."""
    net = network_of(head)
    runner = made(net, way, (1, 8, 32))
    assert not_by_one_launch in runner.describe(), runner.describe()
    x = images(40)
    check(net, runner, x, (1, 8, 5, 32, 40))
    for one in net.fused_heads:
        one.linear.weight.data.mul_(1.5)  # in place: read anew by every request
    check(net, runner, x, (8, 3))
    assert_takes_no_memory(runner, [x[:8], x[:5]])
    runner.close()


@pytest.mark.parametrize("way", WAYS)
def test_many_requests_beside_other_work(way: str) -> None:
    """Logits or features of one request are never those of another, however requests follow one another."""
    net = network()
    runner, x = made(net, way, (8,)), images(64)
    near = near_a_decision(net, make_trunk(net.backbone, net.taps, x[:2]), x, 3 * TOLERANCE)
    wanted = [net(x[start : start + 8]) for start in range(0, 64, 8)]
    torch.cuda.synchronize()
    found = [runner(x[start % 64 : start % 64 + 8]) for start in range(0, 640, 8)]
    for request, result in enumerate(found):
        start = request % 8 * 8
        assert_same(result, wanted[request % 8], TOLERANCE, near[start : start + 8])
    runner.close()
