"""Layers that the backbone runs in passing, and heads behind them: such as a fused head does not know."""

import pytest
import torch
import torchvision
from auxhead.model import EagerRunner, EarlyExitNetwork, FusedAuxHead, make_runner, make_trunk
from support.graph_runner_cases import TOLERANCE, assert_same, images, made, near_a_decision, with_heads
from torch import Tensor, nn


class Beside(nn.Module):
    """Runs layers on what passes by, and hands that on as it is."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        self.layers(x)
        return x


def hidden(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 32), nn.ReLU())


def resnet_with_hidden_layers() -> tuple[nn.Module, list[str]]:
    backbone = torchvision.models.resnet18(num_classes=5)
    backbone.layer1.append(Beside(hidden(64)))
    backbone.layer2.append(Beside(hidden(128)))
    return backbone.eval(), ["layer1.2.layers", "layer2.2.layers"]


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_such_heads_answer_as_the_whole_classifiers_do(trunk: str, without_interpreter: None) -> None:
    backbone, taps = resnet_with_hidden_layers()
    last = [nn.Linear(32, 5) for _ in taps]
    heads = {tap: FusedAuxHead.from_module(nn.Sequential(one)) for tap, one in zip(taps, last, strict=True)}
    x = torch.randn(2, 3, 32, 32)
    network = EarlyExitNetwork(backbone, heads, rules={taps[0]: 1.0, taps[1]: 0.0}, example_input=x)
    with make_runner(network, x, exits="eager", trunk=trunk) as runner, torch.no_grad():
        answer = runner(x)
        seen = backbone.layer2[:2](
            backbone.layer1[:2](backbone.maxpool(backbone.relu(backbone.bn1(backbone.conv1(x)))))
        )
        wanted = torch.softmax(last[1](backbone.layer2[2].layers(seen)), 1)
    assert answer.exit_index.tolist() == [1, 1]
    torch.testing.assert_close(answer.probs, wanted, atol=1e-5, rtol=1e-5)


def test_maps_whose_channels_come_last_are_permuted_in_passing() -> None:
    backbone = torchvision.models.swin_t(num_classes=5)
    backbone.features[1].append(Beside(torchvision.ops.Permute([0, 3, 1, 2])))
    backbone.eval()
    x = torch.randn(2, 3, 32, 32)
    network = EarlyExitNetwork(backbone, {"features.1.2.layers": FusedAuxHead(None, 5)}, example_input=x)
    assert network.heads[0].linear.in_features == 96
    first, last = network.logits(x)
    maps = backbone.features[1][:2](backbone.features[0](x))  # [N, H, W, C]
    torch.testing.assert_close(first, network.heads[0].linear(maps.mean((1, 2))))
    torch.testing.assert_close(last, backbone(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
def test_they_run_from_graphs(way: str, trunk: str, repeatable: None, stops_at_every_tap: None) -> None:
    backbone, taps = resnet_with_hidden_layers()
    x = images(64, torch.float32)
    net = with_heads(backbone, taps, x, torch.float32)
    eager_trunk = make_trunk(net.backbone, net.taps, x[:2], trunk)
    near = near_a_decision(net, eager_trunk, x, TOLERANCE[torch.float32])
    wanted = EagerRunner(net, trunk=eager_trunk)(x)
    assert wanted.exit_index.unique().numel() == 3
    runner = made(net, way, (8, 64), trunk=trunk)
    assert_same(runner(x), wanted, TOLERANCE[torch.float32], near)
    runner.close()
