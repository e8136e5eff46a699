"""Logits of a head by PyTorch's own operations: where a library multiplies sooner, a launch decides by them alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch.head_view import HeadView
from .launch.launch_config import LaunchConfig
from .packed_features import packed_features
from .reference.hidden_layers import HiddenLayers


@torch.no_grad()
def logits_by_library(
    x: Tensor, view: HeadView, weight: Tensor, hidden: HiddenLayers, *, pool_max: bool, config: LaunchConfig
) -> Tensor:
    """Return what a head's logits [N, K] are without their bias, float32, for the view of an input.

    A launch of its own packs features that are pooled, as the configuration says. Whatever is between the head's layers
    is rounded to x's dtype, as in PyTorch; the logits are not.
    """
    with torch.autocast(x.device.type, enabled=False):
        if view.unpooled and not view.turned:
            features = x.as_strided(view.shape, view.strides).flatten(1)
            features = F.relu(features) if hidden.rectifies else features
        else:
            features = packed_features(x, view, config, pool_max=pool_max, rectifies=hidden.rectifies)
        return product(hidden.apply(features), weight)


def product(features: Tensor, weight: Tensor) -> Tensor:
    """Multiply features [N, F] by the rows of a weight [K, F], float32."""
    if features.is_cuda and features.dtype != torch.float32:
        return torch.mm(features, weight.t(), out_dtype=torch.float32)
    return F.linear(features.float(), weight.float())
