"""exit_monitor.py on a GPU: launches count what they merge, in graphs and eagerly."""

import pytest
import torch
from auxhead.model import make_runner
from support.example_models import needs_gpu
from support.exits_plan_cases import images
from support.graph_runner_cases import WAYS
from support.monitored import counted_again, histogram_of, monitored

pytestmark = [*needs_gpu, pytest.mark.usefixtures("stops_at_every_tap")]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_answers_are_counted_once(way: dict) -> None:
    net, batches = monitored("cuda"), [images(8).cuda(), images(8)[:3].cuda(), images(8)[1:6].cuda()]
    with make_runner(net, images(8).cuda(), batch_sizes=(2, 4), **way) as runner:
        assert int(net.monitor.counts().sum()) == 0, "what making it takes"
        answers = [runner(x).cpu() for x in batches for _ in range(3)]
        torch.cuda.synchronize()
        assert torch.equal(counted_again(net), histogram_of(*answers))
    for stop in (False, True):
        answers = [net(x, stop=stop).cpu() for x in batches for _ in range(3)]
        assert torch.equal(counted_again(net), histogram_of(*answers))
