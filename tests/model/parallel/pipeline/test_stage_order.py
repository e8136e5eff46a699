"""Stages of a pipeline, with streams and graphs simulated: their answers, and an order without races.

Each stage has a host and streams of its own, as in a process of its own, and what is sent goes over streams beside
those, as NCCL's does. The waits that this needs are the mutants of ``tests/mutants/waits.toml``.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model.parallel.cut import Cut
from auxhead.model.parallel.pipeline import pipelined as front
from auxhead.model.parallel.pipeline.wire import Wire
from support import simulated_cuda as simulation
from support import stream_order
from support.example_models import SmallNet
from support.spread_exits import images, network
from support.stream_order import Stream

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="simulates CUDA, which is here"),
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="there is nothing to simulate it with"),
    pytest.mark.usefixtures("without_interpreter"),
]
SIZE = 3
THRESHOLDS = (0.3, 1.0, 0.5)


@contextmanager
def simulated():
    def fill(wire, packed, given, stream):
        with stream_order.current(stream):
            for into, each in zip(wire.views(packed), given, strict=True):
                into.copy_(each)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "fill", fill)
        with simulation.simulated_cuda():
            yield


class Rank:
    """A stage in a process of its own."""

    def __init__(self, stage):
        self.host, self.link, self.buffers, self.arrived = {}, Stream(), {}, []
        self.stage = stage
        self.capture()

    def capture(self):
        """Let the stage, which is on the CPU, capture as on a GPU."""
        stage = self.stage
        stage.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "device", SimpleNamespace(type="cuda"))
            stage.capture()

    @contextmanager
    def process(self, stream):
        """Run what follows with this rank's host, on a current stream."""
        order = stream_order.order
        before, order.host = order.host, self.host
        try:
            with stream_order.current(stream):
                yield
        finally:
            order.host = before

    def ran(self, x, given, stream):
        """Run the stage for a request, of what the rank before has sent; returns what it sends."""
        sent, kept = [], []
        with self.process(stream):
            self.stage.begin(x)
            for step, each in enumerate(given):
                handed = self.stage(self._received(step, each))
                self.link.wait_stream(stream)
                with stream_order.current(self.link):
                    sent.append((handed.clone(),))
                kept.append(handed)
            self.stage.finish()
            stream.wait_stream(self.link)
        return sent

    def _received(self, step, given):
        """Receive into the memory that PyTorch's schedule keeps for a step."""
        if self.stage.is_first:
            return given[0]
        stream, link = stream_order.order.current, self.link
        if step not in self.buffers:
            self.buffers[step] = torch.empty_like(given[0])
        link.wait_stream(stream)
        link.wait_stream(given.by)
        with stream_order.current(link):
            self.buffers[step].copy_(given[0])
        self.arrived.append(link.clock[link])
        stream.wait_stream(link)
        return self.buffers[step]


class Sent(tuple):
    """Tensors that a link has sent."""

    by: Stream


class Pipeline:
    """Stages that are asked one after another, each for all of a request."""

    def __init__(self, net, starts, trunk="as_is"):
        self.micro_batch = images(SIZE)
        cut = Cut(net, self.micro_batch)
        ends = [*starts, cut.segments]
        self.stages = [
            front._stage(cut, ends, rank, self.micro_batch, trunk, len(starts)) for rank in range(len(starts))
        ]
        self.sent = []  # kept: that it may be overwritten once it has come is no matter of stages

    def open(self):
        self.ranks = [Rank(stage) for stage in self.stages]
        self._hear_all()
        return self

    def _hear_all(self):
        """What one host knows all know, once the first has heard all answers, and the others of the next request."""
        for knowing in [rank.host for rank in self.ranks]:
            stream_order._merge(stream_order.order.host, knowing)
        for rank in self.ranks:
            stream_order._merge(rank.host, stream_order.order.host)

    def __call__(self, x, streams=None):
        given = [(torch.empty(0),)] * -(-len(x) // SIZE)
        for index, rank in enumerate(self.ranks):
            stream = streams[index] if streams else stream_order.order.current
            sent = rank.ran(x if index == 0 else None, given, stream)
            given = [Sent(each) for each in sent]
            for each in given:
                each.by = rank.link
            self.sent += given
        with stream_order.current(self.ranks[-1].link):
            last = self.stages[-1]
            said = torch.cat([last._hands.views(each[0])[0] for each in given])[: len(x)]
            found = self.stages[0].form.result(said)
            stream_order.order.current.synchronize()
        self._hear_all()
        return found

    def close(self):
        for rank in self.ranks:
            rank.stage.close()


def assert_same(found, wanted):
    assert torch.equal(found.exit_index, wanted.exit_index) and torch.equal(found.label, wanted.label)
    torch.testing.assert_close(found.confidence, wanted.confidence, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-5, atol=1e-5)


WAYS = {"alone": (0,), "two": (0, 2), "three": (0, 1, 3)}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_networks(way):
    """Of batches of all sizes, one after another, on other streams each time, in each process on its own."""
    net = network(SmallNet)
    batches = [images(samples) for samples in (7, 1, 3, 11, 2)]
    wanted = [net(x) for x in batches]
    assert len({*torch.cat([one.exit_index for one in wanted]).tolist()}) == 4
    run = Pipeline(net, WAYS[way])
    found = []
    with simulated():
        run.open()
        streams = [[Stream() for _ in run.ranks] for _ in range(2)]
        for place, x in enumerate(batches):
            with stream_order.current(streams[place % 2][0]):
                late = x.clone()
                found.append(run(late, streams[place % 2]))
                late.fill_(float("nan"))
                del late
        run.close()
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_rules_and_weights_are_written_on_other_streams():
    """Between requests, without a wait; the weights are folded ones, which a refresh writes."""
    net, x = network(), images(8)
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run, found = Pipeline(net, WAYS["three"], trunk="cudnn"), []

    def changed(threshold):
        net.set_rules(threshold)
        with torch.no_grad():
            net.backbone.block1[1].weight.mul_(0.7)

    with simulated():
        run.open()
        streams = [Stream() for _ in run.ranks]
        for threshold in THRESHOLDS:
            with stream_order.current(Stream()):
                changed(threshold)
                for rank in run.ranks:
                    rank.stage.refresh()
            found.append(run(x, streams))
        run.close()
    net.load_state_dict(state)
    for one, threshold in zip(found, THRESHOLDS, strict=True):
        changed(threshold)
        assert_same(one, net(x))


def test_rules_are_written_while_a_graph_reads_them():
    net = network()
    run = Pipeline(net, WAYS["two"])
    with simulated():
        stage = run.open().ranks[0].stage
        stage.begin(run.micro_batch)
        stage(torch.empty(0))
        with stream_order.current(Stream()):
            net.set_rules(0.6)
        run.close()


def test_a_stage_is_captured_anew_while_its_weights_are_written():
    net = network()
    run = Pipeline(net, WAYS["alone"], trunk="cudnn")
    with simulated():
        (rank,) = run.open().ranks
        with stream_order.current(Stream()):
            with torch.no_grad():
                net.backbone.block2[1].weight.mul_(0.7)
            rank.stage.refresh()
        rank.capture()
        run.close()


def test_memory_that_is_handed_over_goes_while_it_is_read():
    run = Pipeline(network(), WAYS["two"])
    with simulated():
        stage = run.open().ranks[0].stage
        computed = stage._graph(run.micro_batch)
        computed.done.wait()
        assert computed.handed.clone().numel()
        del computed
        with stream_order.current(Stream()):
            stage._graph(run.micro_batch)
        run.close()


def test_a_stage_is_not_busy_while_it_waits_for_what_comes(monkeypatch):
    """So long the host waits for its arrival, and no longer: a stage that hangs is to be named, not the one behind."""
    net, x = network(), images(10)
    run, waited = Pipeline(net, WAYS["two"]), []
    synchronize = stream_order.Event.synchronize

    def noted(event):
        waited.append((run.ranks[1].stage.busy_since is not None, event.clock))
        synchronize(event)

    with simulated():
        stage = run.open().ranks[1].stage
        own = stage._graph._stream
        with monkeypatch.context() as patch:
            patch.setattr(stream_order.Event, "synchronize", noted)
            run(x, [Stream(), Stream()])
        assert [busy for busy, _ in waited[-8:]] == [False, True] * 4
        clocks = [clock for _, clock in waited[-8:]]
        for begun, done, arrived in zip(clocks[::2], clocks[1::2], run.ranks[1].arrived, strict=True):
            assert begun.get(run.ranks[1].link, 0) == arrived, "the event before a micro-batch"
            assert begun.get(own, 0) < done.get(own, 0)
        run.close()
