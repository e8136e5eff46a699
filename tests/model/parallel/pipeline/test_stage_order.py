"""Stages of a pipeline, with streams and graphs simulated: their answers, and an order without races.

Each stage has a host and streams of its own, as in a process of its own, and what is sent goes over streams beside
those, as NCCL's does. The waits that this needs are the mutants of ``tests/mutants/waits.toml``.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from auxhead.kernels import runs_triton
from auxhead.model.parallel.pipeline import stage as stage_module
from auxhead.model.parallel.pipeline.answered import cut
from auxhead.model.parallel.pipeline.stage import RequestPart, Stage
from support import simulated_cuda as simulation
from support import stream_order
from support.example_models import Skipping, SmallNet
from support.spread_exits import images, network
from support.stream_order import Stream

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="simulates CUDA, which is here"),
    pytest.mark.skipif(not runs_triton(torch.empty(0)), reason="there is nothing to simulate it with"),
    pytest.mark.usefixtures("without_interpreter"),
]
CPU = torch.device("cpu")
SIZE = 3
THRESHOLDS = (0.3, 1.0, 0.5)


@contextmanager
def simulated():
    with pytest.MonkeyPatch.context() as patch:
        with simulation.simulated_cuda():
            numpy = torch.Tensor.numpy

            def read(tensor):
                stream_order.order.read_by_host(tensor)
                return numpy(tensor)

            patch.setattr(torch.Tensor, "numpy", read)
            yield


class Rank:
    """A stage in a process of its own."""

    def __init__(self, made, start, end, micro_batch):
        self.host, self.link, self.buffers, self.arrived = {}, Stream(), {}, []
        self.stage = Stage(made, start, end, SIZE, CPU, name=f"stage from {start}")
        self.capture(micro_batch)

    def capture(self, micro_batch):
        """Let the stage, which is on the CPU, capture as on a GPU."""
        with pytest.MonkeyPatch.context() as patch:
            wires_like = stage_module.wires_like
            patch.setattr(stage_module, "wires_like", lambda handed, _device: wires_like(handed, CPU))
            patch.setattr(self.stage, "device", SimpleNamespace(type="cuda"))
            self.stage.capture(micro_batch)

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

    def ran(self, request, given, stream):
        """Run the stage for a request, of what the rank before has sent; returns what it sends."""
        sent, kept = [], []
        with self.process(stream):
            self.stage.begin(request)
            for step, each in enumerate(given):
                handed = self.stage(*self._received(step, each))
                self.link.wait_stream(stream)
                with stream_order.current(self.link):
                    sent.append(tuple(one.clone() for one in handed))
                kept.append(handed)
            last = self.stage.finish()
            if last is not None:
                request.answer(last)
            stream.wait_stream(self.link)
        return sent

    def _received(self, step, given):
        """Receive into the memory that PyTorch's schedule keeps for a step."""
        if self.stage.is_first:
            return given
        stream, link = stream_order.order.current, self.link
        if step not in self.buffers:
            self.buffers[step] = [torch.empty_like(one) for one in given]
        link.wait_stream(stream)
        link.wait_stream(given.by)
        with stream_order.current(link):
            for into, one in zip(self.buffers[step], given, strict=True):
                into.copy_(one)
        self.arrived.append(link.clock[link])
        stream.wait_stream(link)
        return self.buffers[step]


class Sent(tuple):
    """Tensors that a link has sent."""

    by: Stream


class Pipeline:
    """Stages that are asked one after another, each for all of a request."""

    def __init__(self, net, starts, trunk="as_is"):
        self.made, self.micro_batch = cut(net, images(SIZE), CPU, trunk)
        self.starts = starts
        self.sent = []  # kept: that it may be overwritten once it has come is no matter of stages

    def open(self):
        ends = [*self.starts[1:], len(self.made.segments)]
        self.ranks = [
            Rank(self.made, start, end, self.micro_batch) for start, end in zip(self.starts, ends, strict=True)
        ]
        self._hear_all()
        return self

    def _hear_all(self):
        """What one host knows all know, once the first has heard all answers, and the others of the next request."""
        for knowing in [rank.host for rank in self.ranks]:
            stream_order._merge(stream_order.order.host, knowing)
        for rank in self.ranks:
            stream_order._merge(rank.host, stream_order.order.host)

    def __call__(self, x, streams=None):
        found = np.full((len(x), self.made.form.width), np.nan)
        given = [(torch.empty(0),)] * -(-len(x) // SIZE)

        def answer(answers):
            rows = answers[:, 0].astype(np.int64)
            assert np.isnan(found[rows]).all(), "answered twice"
            found[rows] = answers

        for index, rank in enumerate(self.ranks):
            stream = streams[index] if streams else stream_order.order.current
            sent = rank.ran(RequestPart(0, len(x), answer, x if index == 0 else None), given, stream)
            given = [Sent(each) for each in sent]
            for each in given:
                each.by = rank.link
            self.sent += given
        self._hear_all()
        return found

    def close(self):
        for rank in self.ranks:
            rank.stage.close()


def assert_same(found, wanted):
    assert np.array_equal(found[:, 3], wanted.exit_index) and np.array_equal(found[:, 1], wanted.label)
    np.testing.assert_allclose(found[:, 2], wanted.confidence, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found[:, 4:], wanted.probs, rtol=1e-5, atol=1e-5)


WAYS = {"alone": (0,), "two": (0, 2), "three": (0, 1, 3)}


@pytest.mark.parametrize(("way", "backbone"), [("alone", Skipping), ("two", SmallNet), ("three", Skipping)])
def test_answers_are_the_networks(way, backbone):
    """Of batches of all sizes, one after another, on other streams each time, in each process on its own."""
    net = network(backbone)
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
                    rank.stage.refresh(net)
            found.append(run(x, streams))
        run.close()
    net.load_state_dict(state)
    for one, threshold in zip(found, THRESHOLDS, strict=True):
        changed(threshold)
        assert_same(one, net(x))


def test_rules_are_written_while_a_graph_reads_them():
    net = network()
    made, x = cut(net, images(SIZE), CPU, "as_is")
    with simulated():
        stage = Rank(made, 0, 2, x).stage
        stage.computed(None, [x])
        with stream_order.current(Stream()):
            net.set_rules(0.6)
        stage.close()


def test_a_stage_is_captured_anew_while_its_weights_are_written():
    net = network()
    made, x = cut(net, images(SIZE), CPU, "cudnn")
    with simulated():
        rank = Rank(made, 0, 4, x)
        with stream_order.current(Stream()):
            with torch.no_grad():
                net.backbone.block2[1].weight.mul_(0.7)
            rank.stage.refresh(net)
        rank.capture(x)
        rank.stage.close()


def test_memory_that_is_handed_over_goes_while_it_is_read():
    net = network()
    made, x = cut(net, images(SIZE), CPU, "as_is")
    with simulated():
        stage = Rank(made, 0, 2, x).stage
        computed = stage.computed(None, [x])
        computed.under_way.done.wait()
        assert [one.clone() for one in computed.handed]
        del computed
        with stream_order.current(Stream()):
            stage.computed(None, [x])
        stage.close()


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
