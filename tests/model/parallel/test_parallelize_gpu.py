"""Networks split over GPUs: two where there are two, and one GPU as two devices, where most of it shows, too."""

import copy
import gc

import pytest
import torch
import torchvision
from auxhead.model import EarlyExitNetwork, ExitResult, FusedAuxHead, attach, parallelize
from auxhead.model.basics.bad_input import BadInput
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
    assert len([line for line in runner.describe().splitlines() if line.startswith("Part ")]) == number
    for _ in range(20):
        for x, one in zip(batches, wanted, strict=True):
            assert_same(runner(x), one)


@pytest.mark.parametrize("late", ["trunk", "side", "other"])
def test_whatever_is_late_is_waited_for(devices, exits, late):
    """A stream is held up before each of several requests that differ."""
    net = network()
    batches = clear_batches(net, [8, 8, 8])
    wanted = [net(x) for x in batches]
    assert not torch.equal(wanted[0].label, wanted[1].label)
    runner = split(net, devices, exits, batch_sizes=(8,))
    others = [captures.streams.trunk for captures in runner.trunk.module._captures.values()]
    streams = runner._captures.streams
    held = {"trunk": [streams.trunk], "side": [streams.side], "other": others}[late]
    for turn in range(9):
        for stream in held:
            with torch.cuda.device(stream.device):
                hold_up(stream, 10_000_000)
        assert_same(runner(batches[turn % 3]), wanted[turn % 3])


def test_every_batch_size(devices, exits):
    """From 1 to 130, padded and split to the sizes that were captured."""
    net = network()
    (x,) = clear_batches(net, [130])
    wanted = net(x)
    runner = split(net, devices, exits, batch_sizes=(1, 8, 64))
    for size in range(1, 131):
        assert_same(runner(x[:size]), ExitResult(*(part[:size] for part in wanted)))


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


def scaled(net, factor):
    with torch.no_grad():
        for name, parameter in net.backbone.named_parameters():
            if "weight" in name:
                parameter.mul_(factor)
        net.exit_heads[2].linear.weight.mul_(-1.0)


@pytest.mark.parametrize("trunk, tolerance", [("as_is", 1e-3), ("cudnn", 1e-2)])
def test_refresh_takes_over_weights(devices, exits, trunk, tolerance):
    """Each device folds its own."""
    net = network()
    whole = copy.deepcopy(net)
    runner = split(net, devices, exits, trunk=trunk)
    assert ("batch norm" in runner.describe()) == (trunk == "cudnn")
    for factor in (1.0, 0.9, 0.8):
        for each in (net, whole):
            scaled(each, factor)
        runner.refresh()
        x = images(512)
        x = x[~near_a_decision(whole, make_trunk(whole.backbone, whole.taps, x[:2]), x, 2e-2)][:21]
        assert len(x) > 8
        assert_same(runner(x), whole(x), tolerance=tolerance)


def test_heads_that_are_modules(devices, exits):
    torch.manual_seed(0)
    heads = {
        "block0": nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 9), nn.Tanh(), nn.Linear(9, 5)),
        "block2": FusedAuxHead(None, 5),
    }
    net = EarlyExitNetwork(SmallNet(), heads, rules=0.21).eval().cuda()
    x = images(8, torch.float32)
    net.check_taps(x)
    whole = copy.deepcopy(net)
    runner = parallelize(net, x, devices=devices, exits=exits, balance=["block0"])
    for threshold in (0.0, 1.0):
        net.set_rules(threshold)
        whole.set_rules(threshold)
        found, wanted = runner(x), whole(x)
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


@two_gpus
def test_a_network_in_parts_says_what_to_call():
    net = network()
    with split(net, TWO["two GPUs"], "overlapped"), pytest.raises(BadInput, match="on cuda:0, cuda:1, as parallelize"):
        net(images(8))
    assert net.to("cuda:0")(images(8)).label.shape == (8,)


def test_memory_goes_with_the_runner(devices, exits):
    net = network()
    split(net, devices, exits).close()  # libraries have their workspaces now
    net.to("cuda:0")
    gc.collect()
    held = [torch.cuda.memory_allocated(device) for device in {*devices}]
    for close in (True, False):
        runner = split(net, devices, exits)
        runner(images(8))
        if close:
            runner.close()
        del runner
        net.to("cuda:0")
        gc.collect()
        assert [torch.cuda.memory_allocated(device) for device in {*devices}] == held


class ModelParallelResNet(torchvision.models.ResNet):
    """As in PyTorch's tutorial on model parallelism, smaller: it has its devices, and its forward goes there."""

    def __init__(self):
        super().__init__(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=5)
        layers = [self.conv1, self.bn1, self.relu, self.maxpool, self.layer1, self.layer2]
        self.seq1 = nn.Sequential(*layers).to("cuda:0")
        self.seq2 = nn.Sequential(self.layer3, self.layer4, self.avgpool).to("cuda:1")
        self.fc.to("cuda:1")

    def forward(self, x):
        x = self.seq2(self.seq1(x).to("cuda:1"))
        return self.fc(x.view(x.size(0), -1))


@two_gpus
@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_a_model_that_is_in_parts_already(trunk, exits):
    torch.manual_seed(0)
    x = torch.randn(6, 3, 64, 64, device="cuda:0")
    network = attach(ModelParallelResNet().eval(), ["seq1"], example_input=x).eval()
    with torch.no_grad():
        wanted = network.backbone(x).softmax(1).amax(1).cpu()
    network.set_rules(1.0)
    with parallelize(network, x, devices=["cuda:0", "cuda:1"], balance=["seq1"], trunk=trunk, exits=exits) as runner:
        found = runner(x)
    assert found.exit_index.eq(1).all()
    torch.testing.assert_close(found.confidence.cpu(), wanted, rtol=1e-2, atol=1e-3)
