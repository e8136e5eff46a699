"""Taps on torchvision's networks: layers that cannot be tapped, with names that can, and channels that come last."""

from collections.abc import Callable

import pytest
import torch
import torchvision
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from auxhead.model.listening.dry_run import dry_run
from support.example_models import suggested
from torch import Tensor, nn


def image() -> Tensor:
    return torch.randn(2, 3, 32, 32)


SIZES = {"patch_size": [4, 4], "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": [4, 4]}
#: Of fewer layers than their likes, but of the same kinds.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=7),
    "vgg11": lambda: torchvision.models.vgg11(num_classes=7),
    "vit": lambda: torchvision.models.VisionTransformer(32, 16, 2, 2, 24, 48, num_classes=7),
    "swin": lambda: torchvision.models.SwinTransformer(**SIZES, num_classes=7),
}


@pytest.mark.parametrize(
    ("name", "tap", "match"),
    [
        ("resnet18", "layer1.0.bn1", "changed in place"),
        ("resnet18", "layer1.0.relu", "2 times"),
        ("resnet18", "layer1.0.bn3", "no layer"),
        ("resnet18", "layer5", "no layer"),
        ("resnet18", "features.1", "no layer"),
        ("vgg11", "features.0", "changed in place"),
        ("vit", "encoder.layers.encoder_layer_0.self_attention", "tuple"),
        ("swin", "features.1.0.attn.qkv", "never runs"),
    ],
)
def test_torchvision_layers_that_cannot_be_tapped(name: str, tap: str, match: str) -> None:
    with torch.device("meta"):
        net = MODELS[name]()
    with pytest.raises(ValueError, match=match) as caught:
        dry_run(net, [tap], image().to("meta"))
    names = suggested(caught.value)
    assert names
    dry_run(net, names[:1], image().to("meta"))


def test_the_channels_of_a_map_are_found_last_in_its_shape_too() -> None:
    net = MODELS["swin"]().eval()  # features.1 is [N, H, W, C]
    with pytest.raises(ValueError, match=r"heads\['features.1'\].*takes 9 features.*\[\d, 24, 8, 8\].*has 24"):
        EarlyExitNetwork(net, {"features.1": FusedAuxHead(9, 7)}, example_input=image())
    heads = {"features.1": FusedAuxHead(24, 7), "permute": FusedAuxHead(48, 7)}
    network = EarlyExitNetwork(net, heads, example_input=image())
    assert [network.extract[tap].layout for tap in network.taps] == ["NHWC", "NCHW"]
