"""The networks of the zoo: torchvision's and timm's by name, with random weights and heads placed by ``attach``."""

import torch
from torch import nn

from ...model import attach
from ...model.basics.bad_input import BadInput
from ..measuring.options import is_factory
from ..measuring.subject import SEED, Subject, find_subject, own_cell, random_pictures, settle_norms, spread_logits

#: The library that makes each network.
LIBRARIES = {
    "resnet18": "torchvision",
    "resnet50": "torchvision",
    "mobilenet_v3_large": "torchvision",
    "efficientnet_b0": "torchvision",
    "regnet_y_400mf": "torchvision",
    "convnext_tiny": "torchvision",
    "densenet121": "torchvision",
    "googlenet": "torchvision",
    "vit_b_16": "torchvision",
    "deit_tiny_patch16_224": "timm",
    "swin_t": "torchvision",
    "mobilenetv4_conv_small": "timm",
}
#: The shape of one picture.
PICTURE = (3, 224, 224)
#: Pictures by which random weights are given statistics and logits.
_PICTURES = 16


def check_networks(models: list[str]) -> None:
    """Refuse, with ``BadInput``, a name that is neither of the zoo's nor a factory, or whose library is missing."""
    for model in models:
        if is_factory(model):
            find_subject(model, "NETWORK")
            continue
        if model not in LIBRARIES:
            raise BadInput(f"NETWORK: got {model}, wants one of {', '.join(LIBRARIES)} or package.module:function")
        if LIBRARIES[model] == "timm":
            _timm()


def zoo_subject(model: str, batch: int, device: torch.device) -> Subject:
    """Make a network of the zoo in float16 and channels_last, with a batch for it; or the network of a factory."""
    if is_factory(model):
        return find_subject(model, "NETWORK")()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(SEED)
        backbone = _backbone(model).to(device)
        pictures = random_pictures(max(_PICTURES, 2 * batch), PICTURE, device)
        settle_norms(backbone, pictures[:_PICTURES])
        backbone = backbone.eval().to(dtype=torch.float16, memory_format=torch.channels_last)  # type: ignore[call-overload]
        pictures = pictures.to(dtype=torch.float16, memory_format=torch.channels_last)
        network = attach(backbone, example_input=pictures[:batch]).eval()
        classifier = [layer for layer in backbone.modules() if isinstance(layer, nn.Linear)][-1]
        if not classifier.weight.any():  # as a ViT's begins
            classifier.weight.normal_(std=classifier.in_features**-0.5)
        spread_logits(network, [*(head.linear for head in network.fused_heads), classifier], pictures[:_PICTURES])
    # pictures like those that the norms have seen: others overflow float16 behind random weights
    inputs = [one.clone(memory_format=torch.preserve_format) for one in pictures.split(batch) if len(one) == batch]
    return Subject(own_cell(model, network, inputs[0]), network, tuple(inputs))


def _backbone(model: str) -> nn.Module:
    if LIBRARIES[model] == "timm":
        made: nn.Module = _timm().create_model(model, pretrained=False)
        return made
    from torchvision import models  # takes a second

    options = {"aux_logits": False, "init_weights": True} if model == "googlenet" else {}
    return models.get_model(model, weights=None, **options)


def _timm():  # type: ignore[no-untyped-def]  # of a library without types
    try:
        import timm
    except ImportError:
        raise BadInput(
            "NETWORK: two networks of the zoo are timm's, which is not installed; pip install timm"
        ) from None
    return timm
