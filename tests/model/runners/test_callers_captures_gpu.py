"""Captures of a caller's own, in this thread or in another one: runners, networks and rules never break them."""

import gc

import pytest
import torch
from auxhead.model import EarlyExitNetwork
from support.example_models import needs_gpu
from support.graph_runner_cases import (
    assert_identical,
    assert_same,
    captured_elsewhere,
    clear_batches,
    hold_up,
    images,
    made,
    network,
)

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


@pytest.mark.parametrize(
    ("mode", "does"),
    [("global", does) for does in ("make", "close", "drop", "request", "eager", "check", "refresh", "assign")]
    + [("thread_local", "request"), ("relaxed", "make")],
)
def test_another_threads_capture_is_not_broken(way: str, mode: str, does: str) -> None:
    """By what a thread does with a runner or a network meanwhile; the process lives on, too."""
    net = network()
    (x,) = clear_batches(net, [8])
    runner = [made(net, way, (8,), trunk="cudnn" if does == "refresh" else "as_is")]
    wanted = runner[0](x)
    net(x)
    unchecked = EarlyExitNetwork(net.backbone, dict(zip(net.taps, net.heads, strict=True))).eval()
    net.heads[0].rule.threshold = net.heads[0].rule.threshold
    other = network()
    for _ in range(3):
        other(x)
    torch.cuda.synchronize()
    if does in ("check", "refresh"):
        torch.cuda.empty_cache()  # so that memory has to be taken from the device
    found = None
    with captured_elsewhere(lambda: other(x), mode=mode, warm=True) as answer:
        if does == "make":
            found = made(net, way, (8,), example=x)(x)
        elif does == "close":
            runner[0].close()
        elif does == "drop":
            runner.clear()
        elif does == "request":
            found = runner[0](x)
        elif does == "eager":
            found = net(x)
        elif does == "check":
            found = unchecked(x)
        elif does == "refresh":
            runner[0].refresh()
        else:
            net.heads[0].rule.threshold = 0.5
    assert_same(answer.result(), other(x))
    if found is not None:
        assert_same(found, wanted)


def test_refresh_and_close_within_a_capture_are_refused_and_leave_it_alone(way: str) -> None:
    net = network()
    runner, x = made(net, way, (8,), trunk="cudnn"), images(8)
    wanted = runner(x)
    graph, y = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y += 1
        for call in (runner.refresh, runner.close, lambda: runner(x)):
            with pytest.raises(RuntimeError, match="being captured"):
                call()
        y += 1
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 3).all()
    assert_identical(runner(x), wanted)


def test_a_runner_that_goes_within_a_capture_does_not_break_it(way: str) -> None:
    net = network()
    (x,) = clear_batches(net, [8])
    runners, wanted, asking = [made(net, way, (8,))], net(x), torch.cuda.Stream()
    graph, y = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    if way != "polled":  # whose call would wait for the answer
        hold_up(asking)
    with torch.cuda.stream(asking):
        found = runners[0](x)
    with torch.cuda.graph(graph):
        y += 1
        runners.clear()  # while its request is under way
        gc.collect()
    graph.replay()
    assert (y == 2).all()
    torch.cuda.synchronize()
    assert_same(found, wanted)
    assert_same(made(net, way, (8,))(x), wanted)


def test_a_rule_that_was_read_on_a_stream_that_is_captured_since() -> None:
    """A write to it waits for the stream's work, and not for what is being captured."""
    head = network().heads[0]
    features, stream = torch.randn(8, 8, 32, 32, device="cuda", dtype=torch.half), torch.cuda.Stream()
    head.rule.threshold = 0.5
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        head(features)
    y = torch.zeros(8, device="cuda")
    with captured_elsewhere(lambda: y.add_(1), stream, "thread_local"):
        head.rule.threshold = 0.25
    assert (y == 2).all() and head.rule.threshold == 0.25
