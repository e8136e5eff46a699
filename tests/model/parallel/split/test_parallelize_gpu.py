"""Networks split over GPUs: two where there are two, and one GPU as two devices, where most of it shows, too."""

import gc

import pytest
import torch
from auxhead.model import EarlyExitNetwork, ExitResult, FusedAuxHead, parallelize
from auxhead.model.trunk.trunk import make_trunk
from support.example_models import SmallNet, needs_gpu
from support.graph_runner_cases import (
    assert_same,
    clear_batches,
    hold_up,
    images,
    near_a_decision,
    network,
)
from support.requests_on_gpus import assert_back_to_back, assert_host_does_not_wait, assert_streams_may_alternate
from torch import nn

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TWO = {"one GPU": ["cuda:0", "cuda:0"], "two GPUs": ["cuda:0", "cuda:1"]}


@pytest.fixture(params=["one GPU", pytest.param("two GPUs", marks=two_gpus)])
def devices(request):
    return TWO[request.param]


@pytest.fixture(params=["overlapped", "polled"])
def exits(request):
    return request.param


@pytest.fixture(autouse=True)
def first_gpu():
    with torch.cuda.device(0):
        yield
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def split(net, devices, exits, **options):
    options = {"batch_sizes": (1, 8), "balance": ["block1"]} | options
    return parallelize(net, images(8), devices=devices, exits=exits, **options)


@pytest.mark.parametrize("balance", [["block0"], ["block2"], "auto"], ids=str)
def test_back_to_back_requests_without_a_wait(devices, exits, balance):
    """Sizes alternate, padded and split; results are kept; earlier requests have left early."""
    net = network()
    batches = clear_batches(net, [1, 5, 8, 1, 3, 12, 1, 8])
    wanted = [net(x) for x in batches]
    assert any(result.exit_index.max() < 3 for result in wanted), "none leaves early"
    runner = split(net, devices, exits, balance=balance)
    assert_back_to_back(runner, batches, wanted)
    assert runner(batches[0]).label.device == torch.device("cuda", 0)


@pytest.mark.parametrize("number", [3, 4])
def test_as_many_parts_as_there_are_segments(exits, number):
    net = network()
    batches = clear_batches(net, [8, 1, 5])
    wanted = [net(x) for x in batches]
    devices = [f"cuda:{index % torch.cuda.device_count()}" for index in range(number)]
    runner = split(net, devices, exits, balance="auto")
    assert len(runner.describe().splitlines()) == number + 3
    for _ in range(20):
        for x, one in zip(batches, wanted, strict=True):
            assert_same(runner(x), one)


@pytest.mark.parametrize("part, late", [(0, "trunk"), (0, "side"), (0, "copies"), (1, "trunk")])
def test_whatever_is_late_is_waited_for(devices, exits, part, late):
    """A stream of a part is held up before each of several requests that differ."""
    net = network()
    batches = clear_batches(net, [8, 8, 8])
    wanted = [net(x) for x in batches]
    assert not torch.equal(wanted[0].label, wanted[1].label)
    runner = split(net, devices, exits, batch_sizes=(8,))
    for turn in range(9):
        streams = runner._parts[part]
        with torch.cuda.device(streams.device):
            hold_up(getattr(streams, late), 10_000_000)
        assert_same(runner(batches[turn % 3]), wanted[turn % 3])


def test_two_streams_of_callers_alternate(devices, exits):
    net = network()
    batches = clear_batches(net, [8, 5, 1, 8])
    wanted = [net(x) for x in batches]
    runner = split(net, devices, exits)
    assert_streams_may_alternate(runner, batches, wanted)


def test_the_host_does_not_wait(devices):
    net = network()
    (x,) = clear_batches(net, [8])
    wanted = net(x)
    assert_host_does_not_wait(split(net, devices, "overlapped"), x, wanted)


def test_default_streams_are_left_alone(devices):
    """Other work there, on every device, is not waited for."""
    net = network()
    (x,) = clear_batches(net, [8])
    wanted, stream = net(x), torch.cuda.Stream()
    runner = split(net, devices, "overlapped")
    with torch.cuda.stream(stream):
        runner(x)
        stream.synchronize()
        busy = [torch.cuda.default_stream(device) for device in {*devices}]
        for default in busy:
            with torch.cuda.device(default.device):
                hold_up(default, 2_000_000_000)
        result = runner(x)
        stream.synchronize()
        assert not any(default.query() for default in busy), "a request has waited for a default stream"
        assert_same(ExitResult(part.cpu() for part in result), ExitResult(part.cpu() for part in wanted))


def test_rules_are_followed_without_a_recapture(devices, exits):
    net = network()
    x = images(8)
    runner = split(net, devices, exits)
    for index in (0, 1, 2, 3, 1, 0):
        net.set_rules({tap: 0.0 if place == index else 1.0 for place, tap in enumerate(net.taps)})
        assert runner(x).exit_index.eq(index).all()
    net.exit_heads[2].rule.enabled = False
    net.set_rules({"block0": 1.0, "block1": 1.0, "block2": 0.0})
    assert runner(x).exit_index.eq(3).all()


def test_refresh_takes_over_weights(devices, exits):
    net = network()
    runner = split(net, devices, exits)
    with torch.no_grad():
        for parameter in net.backbone.parameters():
            parameter.mul_(0.8)
        net.exit_heads[2].linear.weight.mul_(-1.0)
    runner.refresh()
    net.set_rules(0.3)
    x = images(256)
    trunk = make_trunk(net.backbone, net.taps, x[:2])
    x = x[~near_a_decision(net, trunk, x, 1e-2)][:8]
    assert len(x) == 8
    assert_same(runner(x), net(x))


def test_a_folded_trunk(devices, exits):
    """Each device has its own; what is folded is taken over by a refresh."""
    net = network()
    runner = split(net, devices, exits, trunk="cudnn")
    assert "batch norm" in runner.describe()
    for _ in range(2):
        x = images(256)
        x = x[~near_a_decision(net, make_trunk(net.backbone, net.taps, x[:2]), x, 2e-2)][:21]
        assert_same(runner(x), net(x), tolerance=1e-2)
        with torch.no_grad():
            for norm in net.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.weight.mul_(0.9)
        runner.refresh()


def test_heads_that_are_modules(devices, exits):
    torch.manual_seed(0)
    heads = {
        "block0": nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 9), nn.Tanh(), nn.Linear(9, 5)),
        "block2": FusedAuxHead(None, 5),
    }
    net = EarlyExitNetwork(SmallNet(), heads, rules=0.21).eval().cuda()
    x = images(8, torch.float32)
    runner = parallelize(net, x, devices=devices, exits=exits, balance=["block0"])
    for threshold in (0.0, 1.0):
        net.set_rules(threshold)
        found, wanted = runner(x), net(x)
        assert torch.equal(found.exit_index, wanted.exit_index)
        torch.testing.assert_close(found.probs, wanted.probs, rtol=1e-3, atol=1e-3)


def test_a_callers_capture_and_closing(devices, exits):
    net = network()
    (x,) = clear_batches(net, [8])
    wanted = net(x)
    runner = split(net, devices, exits)
    y = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y += 1
        with pytest.raises(RuntimeError, match="current stream is being captured"):
            runner(x)
    torch.cuda.synchronize()
    assert_same(runner(x), wanted)
    runner.close()
    runner.close()
    with pytest.raises(RuntimeError, match="this runner is closed"):
        runner(x)


def test_memory_goes_with_the_runner(devices, exits):
    net = network()
    split(net, devices, exits).close()  # libraries have their workspaces now
    gc.collect()
    held = [torch.cuda.memory_allocated(device) for device in {*devices}]
    for close in (True, False):
        runner = split(net, devices, exits)
        runner(images(8))
        if close:
            runner.close()
        del runner
        gc.collect()
        assert [torch.cuda.memory_allocated(device) for device in {*devices}] == held
