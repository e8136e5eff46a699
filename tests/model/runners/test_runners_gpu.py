"""Graph runners on a GPU: answers equal the eager runner's, whatever changes between requests."""

from functools import partial

import pytest
import torch
import torchvision
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_runner, make_trunk
from support.example_models import needs_gpu
from support.graph_runner_cases import (
    TOLERANCE,
    WAYS,
    CountingNet,
    assert_identical,
    assert_same,
    clear_batches,
    exits_at,
    images,
    made,
    near_a_decision,
    network,
    spoil,
    with_heads,
)
from support.one_by_one import one_by_one
from torch import Tensor, nn

pytestmark = [*needs_gpu, pytest.mark.usefixtures("repeatable", "stops_at_every_tap")]


# The same answers as eager


@pytest.mark.parametrize(("trunk", "dtype"), [("cudnn", torch.float16), ("as_is", torch.float32)], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("every_move_pays")
def test_every_batch_size_answers_as_eager(way: str, trunk: str, dtype: torch.dtype) -> None:
    """From 1 to 130: exact, padded and split batches, one after another without a wait, each of other samples."""
    net, x = network(dtype), images(130, dtype)
    eager_trunk = make_trunk(net.backbone, net.taps, x[:2], trunk)
    eager = partial(one_by_one, net, trunk=eager_trunk)
    near = near_a_decision(net, eager_trunk, x, TOLERANCE[dtype])
    assert near.float().mean() <= (0.1 if dtype == torch.float16 else 0.03), "too much would be excused"
    assert eager(x).exit_index.unique().numel() == 4
    runner = made(net, way, (1, 8, 32, 64), trunk=trunk)
    found = [runner(x.roll(n, 0)[:n]) for n in range(1, 131)]
    excused = sum(
        assert_same(result, eager(x.roll(n, 0)[:n]), TOLERANCE[dtype], near.roll(n, 0)[:n])
        for n, result in enumerate(found, start=1)
    )
    assert excused <= 0.03 * sum(range(1, 131))
    runner.close()


MODELS = {
    "resnet18": ("layer1", "layer2.0", "layer3"),
    "mobilenet_v3_small": ("features.3", "features.8"),
    "densenet121": ("features.transition1", "features.transition2"),
}


@pytest.mark.parametrize("model", MODELS)
def test_torchvision_models_as_they_are(way: str, model: str) -> None:
    torch.backends.cudnn.deterministic = False  # such algorithms cannot be captured in the body of a node
    backbone = getattr(torchvision.models, model)(num_classes=10)
    net = with_heads(backbone, MODELS[model], images(64, torch.float32, 64), torch.float32)
    example = images(2, torch.float32, 64)
    runner, trunk = made(net, way, (4,), example=example), make_trunk(net.backbone, net.taps, example)
    labels = set()
    for samples in (4, 3):
        for index in range(len(net.taps) + 1):
            x = images(samples, torch.float32, 64)
            with exits_at(net, index):
                found, wanted = runner(x), net(x)
                near = near_a_decision(net, trunk, x, 5e-3)
            assert found.exit_index.eq(index).all()
            assert_same(found, wanted, 5e-3, near)
            labels.update(wanted.label.tolist())
    assert len(labels) > 1
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())
    runner.close()


def test_an_inductor_trunk(way: str) -> None:
    if way != "polled":
        pytest.skip("compiling takes long: once is enough")
    net = network()
    runner, batches = made(net, way, (8,), trunk="inductor"), clear_batches(net, [8, 5])
    for x in batches:
        assert_same(runner(x), net(x), 1e-2)


class Vectors(nn.Module):
    """Taps that return [N, T, D] and [N, D]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(12, 24), nn.GELU())
        self.vector = nn.Sequential(nn.Linear(24, 20), nn.GELU())
        self.fc = nn.Linear(20, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.vector(self.tokens(x).mean(1)))


@pytest.mark.parametrize("classes", [2, 3000])
def test_vectors_tokens_and_any_number_of_classes(way: str, classes: int) -> None:
    x = torch.randn(12, 6, 12, device="cuda") + 2 * torch.randn(12, 1, 12, device="cuda")
    heads = {"tokens": FusedAuxHead(None, classes), "vector": FusedAuxHead(None, classes, pool="none")}
    net = EarlyExitNetwork(Vectors(classes).cuda(), heads, example_input=x).eval()
    for head in net.heads:
        with torch.no_grad():
            head.linear.weight.mul_(10)
    runner = made(net, way, (1, 8), example=x[:1])
    for index in range(3):
        with exits_at(net, index):
            for samples in (1, 8, 3, 12):
                wanted = net(x[:samples])
                assert wanted.exit_index.eq(index).all()
                top = wanted.probs.sort(1, descending=True).values
                near = top[:, 0] - top[:, 1] <= 1e-3
                assert_same(runner(x[:samples]), wanted, 1e-3, near)


# What skips work, and what does not


#: The last segment that runs when all leave at the head with this index, or never.
LAST_SEGMENT = {"overlapped": (3, 3, 3), "polled": (1, 2, 3), "gated": (0, 1, 2)}


@pytest.mark.parametrize("samples", [8, 3, 1])
def test_an_exit_skips_the_rest_of_the_network(way: str, samples: int) -> None:
    net = network(backbone=CountingNet())
    runner, x = made(net, way), images(samples)
    for index, last in enumerate((*LAST_SEGMENT[way], 3)):
        with exits_at(net, index):
            net.backbone.runs.zero_()
            runner(x)
            torch.cuda.synchronize()
        ran = net.backbone.runs.tolist()
        assert ran == [int(segment <= last) for segment in range(4)], (index, ran)


def test_padding_neither_answers_nor_holds_a_batch_open(way: str) -> None:
    """The rows that pad a batch hold samples that are never sure, of the request before."""
    net = network(backbone=CountingNet())
    runner, x = made(net, way, (8,)), images(64)
    with exits_at(net, 0):
        order = net(x).confidence.argsort()
    unsure, sure = x[order[:8]], x[order[-3:]]
    net.set_rules({"block0": net.heads[0].rule.threshold, "block1": 1.0, "block2": 1.0})
    for _ in range(3):
        assert runner(unsure).exit_index.eq(3).all()
        torch.cuda.synchronize()
        net.backbone.runs.zero_()
        found = runner(sure)
        torch.cuda.synchronize()
        assert found.exit_index.tolist() == [0, 0, 0] and found.probs.shape[0] == 3
        assert net.backbone.runs.tolist() == [int(s <= LAST_SEGMENT[way][0]) for s in range(4)]
        mixed = torch.cat([sure[:1], unsure[:2]])
        assert runner(mixed).exit_index.tolist() == [0, 3, 3]


# Weights


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_weights_changed_in_place_are_seen(way: str, trunk: str) -> None:
    net = network()
    runner = made(net, way, trunk=trunk)
    x = images(8)
    for layer in (net.backbone.block0[0], net.heads[0].linear, net.backbone.fc):
        index = 0 if layer is not net.backbone.fc else 3
        with exits_at(net, index):
            before = runner(x)
            with torch.no_grad():
                layer.weight.copy_(torch.randn_like(layer.weight))
            if trunk == "cudnn":
                runner.refresh()
            found, wanted = runner(x), make_runner(net, images(2), exits="eager", trunk=trunk)(x)
        assert (found.probs - before.probs).abs().max() > 0.01, "the change does not show"
        assert ((found.probs - wanted.probs).abs() <= 0.02).all()


def test_graphs_never_read_memory_that_was_given_back(way: str) -> None:
    """The backbone gets other memory: the runner answers as it was captured, and refresh() says what is wrong."""
    net = network()
    runner, (x,) = made(net, way), clear_batches(net, [5])
    wanted = runner(x)
    for name, parameter in net.backbone.named_parameters():
        if not name.startswith("fc."):
            parameter.data = torch.zeros_like(parameter)
    spoil()
    assert_identical(runner(x), wanted)
    with pytest.raises(RuntimeError, match=r"network: backbone.block0.0.weight was given other memory"):
        runner.refresh()
    net.backbone.fc.weight.data = torch.zeros_like(net.backbone.fc.weight)
    with pytest.raises(RuntimeError, match="the backbone's 'fc': its weight was given other memory"):
        runner(x)
