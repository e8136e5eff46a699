"""Thresholds that follow requests on a GPU: graphs stay as they were captured, and answer by the new thresholds."""

import functools

import pytest
import torch
from auxhead.model import ExitMonitor, Retuner, make_trunk, measure_exit_latencies, retune_thresholds
from support.example_models import needs_gpu
from support.graph_runner_cases import TOLERANCE, assert_same, images, made, near_a_decision, network
from support.one_by_one import one_by_one

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_graphs_stay_and_answer_by_the_new_thresholds(way: str, trunk: str) -> None:
    net = network()
    net.monitor = ExitMonitor((0.25,) * 4, 1000)
    eager_trunk = make_trunk(net.backbone, net.taps, images(2), trunk)
    ranges = iter([(0.0, 0.5, 1.0), (1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.4, 0.3, 0.2)])
    retuner = Retuner(net, lambda _log: next(ranges), window=8, share=1.0)
    with made(net, way, trunk=trunk) as runner:
        held = {size: (one, list(one.graphs)) for size, one in runner._captured.items()}
        where = [head.rule.threshold_tensor.data_ptr() for head in net.exit_heads]
        for index in (0, 3, 1, None):
            x = images(8)
            runner(x)  # by the thresholds before, under way while the request is logged
            thresholds = retuner.observe(x)
            assert thresholds == tuple(head.rule.threshold for head in net.exit_heads)
            assert int(net.monitor.counts().sum()) == 0, "it counts from 0 again"
            for samples in (8, 3, 17):
                x = images(samples)
                found, wanted = runner(x), one_by_one(net, x, trunk=eager_trunk)
                near = near_a_decision(net, eager_trunk, x, TOLERANCE[torch.float16])
                assert index is None or found.exit_index.eq(index).all()
                assert_same(found, wanted, near=near)
            torch.cuda.synchronize()
            assert int(net.monitor.counts().sum()) == 28
        assert {size: (one, list(one.graphs)) for size, one in runner._captured.items()} == held
        assert [head.rule.threshold_tensor.data_ptr() for head in net.exit_heads] == where


def test_a_polled_runner_is_retuned_by_its_own_latencies() -> None:
    net = network()
    with made(net, "polled", (1, 8)) as runner:
        measured = measure_exit_latencies(net, runner, images(8), rounds=5)
        policy = functools.partial(retune_thresholds, latencies=measured, max_disagreement=0.1)
        retuner = Retuner(net, policy, window=160, share=1.0)
        found = []
        for _ in range(40):
            x = images(8)
            runner(x)
            found.append(retuner.observe(x))
        assert [place for place, one in enumerate(found) if one is not None] == [19, 39]
        assert found[-1] == policy(retuner.log) == tuple(head.rule.threshold for head in net.exit_heads)
        assert len(runner(images(8)).label) == 8
