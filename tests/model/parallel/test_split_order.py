"""Networks split over devices, with streams and graphs simulated: their answers, and an order without races."""

import gc
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import ExitMonitor, ExitRule
from auxhead.model.parallel import parallelize as front
from auxhead.model.parallel import split_trunk
from auxhead.model.parallel.cut import Cut
from auxhead.model.trunk.trunk import Trunk
from support import simulated_cuda as simulation
from support import stream_order
from support.example_models import SmallNet
from support.exits_plan_cases import assert_same
from support.spread_exits import images, network

pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here"),
    pytest.mark.usefixtures("without_interpreter"),  # what the eager network answers with
]
EXITS = ("overlapped", "polled")
#: The second is another one for PyTorch, of the same memory.
DEVICES = (torch.device("cpu"), torch.device("cpu", 0))


@contextmanager
def simulated():
    """Simulated streams and graphs, with streams of the CPU, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_trunk, "has_streams", lambda _x: True)
        with simulation.simulated_cuda():
            yield


class Split:
    """A network that is cut outside of the simulation, to be made a runner in it."""

    def __init__(self, net, exits, starts=(0, 2), devices=DEVICES, sizes=(4,), trunk="as_is"):
        cut, x = Cut(net, images(3)), images(max(sizes))
        self.made, self.devices, self.options = (net, x, exits), devices, {"batch_sizes": sizes}
        self.parts = []
        with torch.no_grad():
            for start, end in pairwise([*starts, cut.segments]):
                self.parts.append(cut.place(start, end, cut.move(start, end, DEVICES[0]), x, trunk))
                x = self.parts[-1].run(x, lambda *_: None)

    def runner(self):
        net, x, exits = self.made
        module = split_trunk.SplitTrunk(self.parts, self.devices, net.taps, x.shape[1:])
        trunk = Trunk(module, None, torch.contiguous_format, (), parts=[part.trunk for part in self.parts])
        return front._RUNNERS[exits](net, x, trunk=trunk, **self.options)


@pytest.mark.parametrize(
    "exits, starts",
    [("overlapped", (0, 2)), ("overlapped", (0, 1, 3)), ("polled", (0, 1)), ("polled", (0, 1, 2, 3))],
    ids=["2 parts", "3 parts", "2 parts, polled", "4 parts, polled"],
)
def test_answers_are_the_networks(exits, starts):
    """Of batches of all sizes, padded and split, one after another without a wait; results are kept."""
    net = network(SmallNet)
    batches = [images(samples) for samples in (4, 1, 3, 7)]
    wanted = [net(x) for x in batches]
    assert len({*torch.cat([one.exit_index for one in wanted]).tolist()}) == 4
    split = Split(net, exits, starts, [*DEVICES, *DEVICES][: len(starts)], (2, 4) if len(starts) == 2 else (4,))
    with simulated():
        runner = split.runner()
        found = [runner(x) for x in batches]
        runner.close()
        runner.close()
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("exits", EXITS)
def test_rules_and_parameters_are_followed(exits):
    """Without a recapture; and a patient head counts what heads on other devices have said."""
    net, x = network(), images(4)
    net.exit_heads[2].rule.assign(ExitRule(criterion="patience", threshold=1.0))
    settings = [(1.0, 1.0), (0.4, 0.5), (0.0, 0.3), (1.0, 0.6)]
    found = []

    def changed(rules):
        net.set_rules(dict(zip(net.taps, rules, strict=False)))
        with torch.no_grad():
            net.exit_heads[1].linear.weight.mul_(-1.0)
            net.backbone.block2[0].weight.mul_(0.7)

    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    split = Split(net, exits, (0, 1, 2), [*DEVICES, DEVICES[0]], trunk="cudnn")
    with simulated():
        runner = split.runner()
        for rules in settings:
            changed(rules)
            runner.refresh()
            found.append(runner(x))
    net.load_state_dict(state)
    exits_seen = set()
    for one, rules in zip(found, settings, strict=True):
        changed(rules)
        wanted = net(x)
        assert torch.equal(one.exit_index, wanted.exit_index) and torch.equal(one.label, wanted.label)
        exits_seen |= {*wanted.exit_index.tolist()}
    assert len(exits_seen) > 2


def test_a_monitor_counts():
    net, x = network(), images(7)
    net.monitor = ExitMonitor([0.25] * 4, 100)
    split = Split(net, "polled", (0, 1, 3), [*DEVICES, DEVICES[0]])
    with simulated():
        answer = split.runner()(x)
        counts = net.monitor.counts()
    assert torch.equal(counts, answer.exit_index.bincount(minlength=4))


@pytest.mark.parametrize("exits", EXITS)
def test_callers_on_other_streams(exits):
    net, batches = network(), [images(samples) for samples in (4, 3, 1, 4)]
    wanted = [net(x) for x in batches]
    found, split = [], Split(net, exits)
    with simulated():
        runner = split.runner()
        for x in batches:
            with stream_order.current(stream_order.Stream()):
                late = x.clone()
                answer = runner(late)
                late.fill_(float("nan"))
                found.append(answer.label.clone())
                del late, answer
        runner.close()
        gc.collect()
        assert (torch.ones(3) + 1).sum() == 6  # in memory that the runner had
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other.label)
