"""Captures of a caller's own, in this thread or in another one: runners, networks and rules never break them."""

import gc
import threading
import traceback

import pytest
import torch
from auxhead.model import EarlyExitNetwork
from support.example_models import needs_gpu
from support.graph_runner_cases import assert_identical, assert_same, clear_batches, hold_up, images, made, network

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
    begun, ended, errors = threading.Event(), threading.Event(), []
    graph, answers = torch.cuda.CUDAGraph(), []

    def capture() -> None:
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                other(x)  # libraries make handles for each thread
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                other(x)
                begun.set()
                ended.wait(20)
                answers.append(other(x))
        except Exception:
            errors.append(traceback.format_exc())
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(20)
    found = None
    try:
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
    finally:
        ended.set()
        thread.join()
    assert not errors, errors
    graph.replay()
    assert_same(answers[0], other(x))
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
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    begun, ended, errors = threading.Event(), threading.Event(), []

    def capture() -> None:
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                y.add_(1)
                begun.set()
                ended.wait(20)
                y.add_(1)
        except Exception:
            errors.append(traceback.format_exc())
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(20)
    try:
        head.rule.threshold = 0.25
    finally:
        ended.set()
        thread.join()
    assert not errors, errors
    graph.replay()
    assert (y == 2).all() and head.rule.threshold == 0.25
