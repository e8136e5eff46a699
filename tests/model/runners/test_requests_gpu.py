"""Requests to graph runners on a GPU: one after another, of any kind, in any mode, from threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from auxhead.model import ExitResult, make_runner, make_trunk
from support.example_models import needs_gpu
from support.graph_runner_cases import (
    assert_identical,
    assert_same,
    assert_takes_no_memory,
    clear_batches,
    images,
    made,
    network,
)
from support.requests_on_gpus import assert_back_to_back, assert_host_does_not_wait, assert_streams_may_alternate

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


# One request after another


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_back_to_back_requests_without_a_wait(way: str, trunk: str) -> None:
    """Sizes and inputs alternate; earlier requests left early, and results stay what they were."""
    net = network()
    runner = made(net, way, trunk=trunk)
    eager = make_runner(net, images(2), exits="eager", trunk=trunk)
    batches = clear_batches(net, [1, 5, 8, 1, 3, 12, 1, 8], make_trunk(net.backbone, net.taps, images(2), trunk))
    wanted = [eager(x) for x in batches]
    assert any(result.exit_index.max() < 3 for result in wanted), "none leaves early"
    assert_back_to_back(runner, batches, wanted)


@pytest.mark.parametrize("first", [True, False], ids=["first request elsewhere", "later"])
def test_two_streams_of_callers_alternate(way: str, first: bool) -> None:
    net = network()
    runner, batches = made(net, way), clear_batches(net, [8, 5, 1, 8])
    wanted = [net(x) for x in batches]
    if not first:
        runner(batches[0])
    assert_streams_may_alternate(runner, batches, wanted)


@pytest.mark.parametrize("where", ["beside others", "channels_last", "contiguous", "host", "pinned"])
def test_three_channels_of_half_precision_are_read_in_four(way: str, where: str, monkeypatch) -> None:
    """Of a request's own memory, which may have anything in a fourth channel, only the three are read."""
    monkeypatch.setattr("auxhead.model.trunk.trunk._is_no_slower", lambda *_: True)  # whatever else the device does
    net = network()
    eager = make_runner(net, images(2), exits="eager", trunk="cudnn")
    batches = clear_batches(net, [8, 3, 8], make_trunk(net.backbone, net.taps, images(2), "cudnn"))
    beside = torch.full((8, 4, *images(1).shape[2:]), float("nan"), dtype=torch.float16, device="cuda")
    beside = beside.contiguous(memory_format=torch.channels_last)
    with made(net, way, trunk="cudnn") as runner:
        assert "Graphs read batches in 4 channels" in runner.describe()
        for x in batches:
            beside[: len(x), :3] = x
            given = {
                "beside others": beside[: len(x), :3],
                "channels_last": x.contiguous(memory_format=torch.channels_last),
                "contiguous": x.contiguous(),
                "host": x.cpu().contiguous(memory_format=torch.channels_last),
                "pinned": x.cpu().contiguous(memory_format=torch.channels_last).pin_memory(),
            }[where]
            assert_same(runner(given), eager(x))


@pytest.mark.parametrize("way", ["overlapped", "gated"])
def test_the_host_does_not_wait(way: str) -> None:
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [8])
    assert_host_does_not_wait(runner, x, net(x))


def test_no_call_of_cuda_waits(way: str) -> None:
    net = network()
    runner, batches = made(net, way), clear_batches(net, [8, 5, 1, 12])
    wanted = [net(x) for x in batches]
    pinned = [x.cpu().pin_memory() for x in batches]
    for x in (*batches, *pinned):
        runner(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [runner(x) for _ in range(3) for x in (*batches, *pinned)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for i, result in enumerate(found):
        assert_same(result, wanted[i % 4])


def test_a_steady_state_takes_no_memory_from_the_device(way: str) -> None:
    net = network()
    assert_takes_no_memory(made(net, way), [images(n) for n in (8, 5, 1, 8)])


# What a request may be


def test_inputs_from_anywhere_and_of_any_layout(way: str) -> None:
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [5])
    wanted = runner(x)
    assert wanted.exit_index.device == x.device
    wide = torch.zeros(5, 3, 32, 64, device="cuda", dtype=x.dtype)
    wide[..., ::2] = x
    others = {
        "pageable": x.cpu(),
        "pinned": x.cpu().pin_memory(),
        "pageable, channels_last": x.cpu().to(memory_format=torch.channels_last),
        "strided": wide[..., ::2],
        "strided on the CPU": wide.cpu()[..., ::2],
        "channels_last": x.to(memory_format=torch.channels_last),
        "with gradient": x.clone().requires_grad_(),
        "part of a larger one": torch.cat([x, x])[5:],
        "negated when it is read": torch._neg_view(-x),
    }
    for name, other in others.items():
        assert torch.equal(other.cuda(), x), name
        runner(images(8))  # another one in between
        found = runner(other)
        assert_identical(found, wanted)
        assert not found.confidence.requires_grad and found.label.is_cuda, name
    one = x[:1].expand(8, -1, -1, -1)
    assert_identical(runner(one), runner(one.contiguous()))


# Modes around a call


def test_autocast_is_refused_at_capture_and_changes_no_call() -> None:
    net = network(torch.float32)
    runner, x = made(net, "polled"), images(12, torch.float32)
    wanted = runner(x)
    with torch.autocast("cuda", torch.float16):
        assert_identical(runner(x), wanted)
        with pytest.raises(RuntimeError, match="cannot capture under autocast"):
            made(net, "polled")
    assert_identical(runner(x), wanted)


# Threads


def test_runners_in_two_threads_at_once(way: str) -> None:
    """Captured on streams of their own: workspaces of cuBLAS, which a graph keeps, are not shared."""
    nets = [network(), network()]
    runners, batches = [made(net, way) for net in nets], clear_batches(nets[0], [8, 5])
    wanted = [net(x) for net, x in zip(nets, batches, strict=True)]
    torch.cuda.synchronize()

    def run(i: int) -> list[ExitResult]:
        with torch.cuda.stream(torch.cuda.Stream()):
            return [runners[i](batches[i]) for _ in range(200)]

    with ThreadPoolExecutor(2) as threads:
        for found, right in zip(threads.map(run, range(2)), wanted, strict=True):
            for result in found:
                assert_same(result, right)
