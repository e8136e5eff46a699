"""Networks split over devices, with streams and graphs simulated: their answers, and an order without races."""

import gc
from contextlib import contextmanager

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model import ExitMonitor, ExitRule
from auxhead.model.parallel.segments import segments_of
from auxhead.model.parallel.split import captured, parallelize
from support import simulated_cuda as simulation
from support import stream_order
from support.example_models import Skipping, SmallNet
from support.exits_plan_cases import assert_same
from support.spread_exits import images, network
from torch.utils._python_dispatch import _disable_current_modes

pytestmark = [
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="kernels are not interpreted here"),
    pytest.mark.usefixtures("without_interpreter"),  # what the eager network answers with
]
EXITS = ("overlapped", "polled")
#: The second is another one for PyTorch, of the same memory.
DEVICES = (torch.device("cpu"), torch.device("cpu", 0))


@contextmanager
def simulated():
    """Simulated streams and graphs, for the modules that split networks, too."""

    def copy_between(into, source, stream):
        with stream_order.current(stream):
            into.copy_(source)

    def cut(*arguments):
        with _disable_current_modes():
            return segments_of(*arguments)

    poll = captured.PolledBatch.poll

    def polled(batch, stop, stream):
        still_open = poll(batch, stop, stream)
        stream_order.order.see()
        return still_open

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "copy_between", copy_between)
        patch.setattr(parallelize, "segments_of", cut)
        patch.setattr(captured.PolledBatch, "poll", polled)
        with simulation.simulated_cuda():
            yield


def split(net, exits, sizes=(4,), starts=(0, 2), devices=DEVICES):
    return parallelize._captured(net, images(3), devices, [*starts], [*sizes], exits, "as_is")


@pytest.mark.parametrize(
    "exits, starts, backbone",
    [
        ("overlapped", (0, 2), SmallNet),
        ("overlapped", (0, 1, 3), Skipping),
        ("polled", (0, 1), Skipping),
        ("polled", (0, 1, 2, 3), SmallNet),
    ],
    ids=["2 parts", "3 parts", "2 parts, polled", "4 parts, polled"],
)
def test_answers_are_the_networks(exits, starts, backbone):
    """Of batches of all sizes, padded and split, one after another without a wait; results are kept."""
    net = network(backbone)
    batches = [images(samples) for samples in (4, 1, 3, 7)]
    wanted = [net(x) for x in batches]
    assert len({*torch.cat([one.exit_index for one in wanted]).tolist()}) == 4
    with simulated():
        sizes = (2, 4) if len(starts) == 2 else (4,)
        runner = split(net, exits, sizes, starts, [*DEVICES, *DEVICES][: len(starts)])
        found = [runner(x) for x in batches]
        runner.close()
        runner.close()
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("exits", EXITS)
def test_rules_and_parameters_are_followed_where_they_are_copies(exits):
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
    with simulated():
        runner = split(net, exits, starts=(0, 1, 2), devices=[*DEVICES, DEVICES[0]])
        for rules in settings:
            changed(rules)
            runner.refresh()
            found.append(runner(x))
    net.load_state_dict(state)
    exits_seen = set()
    for one, rules in zip(found, settings, strict=True):
        changed(rules)
        assert_same(one, wanted := net(x))
        exits_seen |= {*wanted.exit_index.tolist()}
    assert len(exits_seen) > 2


def test_a_monitor_counts_on_every_device():
    net, x = network(), images(7)
    net.monitor = ExitMonitor([0.25] * 4, 100)
    with simulated():
        runner = split(net, "polled", starts=(0, 1, 3), devices=[*DEVICES, DEVICES[0]])
        answer = runner(x)
        counts = net.monitor.counts()
    assert torch.equal(counts, answer.exit_index.bincount(minlength=4))


def test_the_host_launches_no_more_once_all_are_answered(monkeypatch):
    """What is launched ahead of the answer is one graph of the trunk, and the crossing before it."""
    net, x = network(), images(4)
    launched = []
    launch = captured.SplitBatch._launch
    monkeypatch.setattr(
        captured.SplitBatch, "_launch", lambda parts, piece: (launched.append(piece), launch(parts, piece))
    )
    with simulated():
        runner = split(net, "polled", starts=(0, 1, 2, 3), devices=[*DEVICES, *DEVICES])
        for index in (1, 0, 2, 1, 3):
            net.set_rules({tap: 0.0 if place == index else 1.0 for place, tap in enumerate(net.taps)})
            launched.clear()
            assert runner(x).exit_index.eq(index).all()
            assert launched == [*range(min(index + 2, 4))]


@pytest.mark.parametrize("exits", EXITS)
def test_callers_on_other_streams(exits):
    net, batches = network(), [images(samples) for samples in (4, 3, 1, 4)]
    wanted = [net(x) for x in batches]
    found = []
    with simulated():
        runner = split(net, exits)
        for x in batches:
            with stream_order.current(stream_order.Stream()):
                late = x.clone()
                answer = runner(late)
                late.fill_(float("nan"))
                found.append(answer.label.clone())
                del late, answer
        net.set_rules({"block0": 1.0, "block1": 0.0, "block2": 1.0})  # the second part has begun by then
        for x in batches[:2]:  # the first leaves graphs and copies under way that it did not need
            with stream_order.current(stream_order.Stream()):
                runner(x)
        runner.close()
        gc.collect()
        assert (torch.ones(3) + 1).sum() == 6  # in memory that the runner had
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other.label)


def test_an_interrupted_request_leaves_nothing_behind(monkeypatch):
    net, batches = network(), [images(4), images(4)]
    wanted = net(batches[1])
    with simulated():
        runner = split(net, "polled", starts=(0, 1, 2, 3), devices=[*DEVICES, *DEVICES])
        cross = captured.SplitBatch._cross

        def interrupted(parts, number):
            cross(parts, number)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(captured.SplitBatch, "_cross", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runner(batches[0])
        found = runner(batches[1])
    assert_same(found, wanted)
