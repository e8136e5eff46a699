"""Logits of a head by PyTorch's own operations: where a library multiplies sooner, a launch decides by them alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch.head_view import HeadView
from .reference.hidden_layers import HiddenLayers


@torch.no_grad()
def logits_by_library(x: Tensor, view: HeadView, weight: Tensor, hidden: HiddenLayers, *, pool_max: bool) -> Tensor:
    """Return what a head's logits [N, K] are without their bias, float32, for the view of an input.

    Whatever is between its layers is rounded to x's dtype, as in PyTorch; the logits are not.
    """
    with torch.autocast(x.device.type, enabled=False):
        maps = x.as_strided(view.shape, view.strides)
        features = hidden.apply(_pooled(F.relu(maps) if hidden.rectifies else maps, view, pool_max))
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(features, weight.t(), out_dtype=torch.float32)
        return F.linear(features.float(), weight.float())


def _pooled(maps: Tensor, view: HeadView, pool_max: bool) -> Tensor:
    """Pool [N, C, H, W] to [N, features]."""
    if view.unpooled:
        return maps.flatten(1)
    if view.positions == 1:
        return maps.amax((2, 3)) if pool_max else maps.mean((2, 3))
    pool = F.adaptive_max_pool2d if pool_max else F.adaptive_avg_pool2d
    return pool(maps, (view.grid_h, view.grid_w)).flatten(1)
