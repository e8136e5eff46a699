"""Work before the launch that decides: features packed by a launch of their own, or logits of PyTorch's operations.

Features are packed pooled, or in the weight's order. Logits are a library's where it multiplies sooner.
"""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch.constants import PackConstants
from .launch.head_view import HeadView
from .launch.launch_config import LaunchConfig
from .noted import launch
from .reference.hidden_layers import HiddenLayers

try:
    from .jit import pack as kernel
except ImportError:  # no Triton for this platform
    kernel = None  # type: ignore[assignment]

#: Warps of a program: two or eight were hardly ever sooner (blocks by rule of 112 heads, H100, in no record).
WARPS = 4
#: Constants and compiled kernel of launches, by all that they depend on.
_compiled: dict[tuple[Hashable, ...], tuple[PackConstants, Any]] = {}


def run_before_launch(
    x: Tensor, view: HeadView, weight: Tensor, hidden: HiddenLayers, config: LaunchConfig, *, pool_max: bool
) -> Tensor:
    """Run what comes before a head's launch; return what that reads: x, packed features, or a library's logits.

    ``view`` is that of x, ``weight`` the last layer's.
    """
    if config.by_library:
        return logits_by_library(x, view, weight, hidden, config, pool_max=pool_max)
    if config.packs:
        return packed_features(x, view, config, pool_max=pool_max, rectifies=hidden.rectifies)
    return x


def head_that_reads(
    view: HeadView, config: LaunchConfig, hidden: HiddenLayers, *, pool_max: bool
) -> tuple[HeadView, LaunchConfig, HiddenLayers, bool]:
    """Return the arguments for what a launch reads: of packed features, these are the input, else as they are."""
    if not config.packs:
        return view, config, hidden, pool_max
    features = view.shape[1] * view.positions
    vectors = HeadView((view.shape[0], features, 1, 1), (features, 1, 0, 0), 1, 1)
    config = replace(config, features="in place", block_c=config.block_f, block_p=1, block_a=1, stages=1)
    return vectors, config, hidden._replace(rectifies=False), False


def packed_features(x: Tensor, view: HeadView, config: LaunchConfig, *, pool_max: bool, rectifies: bool) -> Tensor:
    """Launch what packs a head's features [N, features] in x's dtype, and return them.

    ``view`` is that of x; features are of its ReLU if the head ``rectifies``.
    """
    samples, channels = view.shape[:2]
    features = torch.empty(samples, channels * view.positions, dtype=x.dtype, device=x.device)
    key = (x.device, x.dtype, view, x.data_ptr() % 16, config, pool_max, rectifies)
    constants, compiled = _compiled.get(key) or (None, None)
    if constants is None:
        constants = PackConstants.of(config, view, pool_max=pool_max, rectifies=rectifies)
    programs = samples * -(-channels // config.block_c) * -(-view.positions // config.block_p)
    with torch.cuda.device_of(x):
        options = {} if compiled else {"num_warps": WARPS}
        arguments = ((x, *view.strides), features, view.sizes, constants)
        _compiled[key] = constants, launch(kernel.pack_kernel, (programs, 1, 1), arguments, options, compiled)
    return features


@torch.no_grad()
def logits_by_library(
    x: Tensor, view: HeadView, weight: Tensor, hidden: HiddenLayers, config: LaunchConfig, *, pool_max: bool
) -> Tensor:
    """Return what a head's logits [N, K] are without their bias, float32; features that are pooled are packed.

    Whatever is between the head's layers is rounded to x's dtype, as in PyTorch; the logits are not.
    """
    with torch.autocast(x.device.type, enabled=False):
        if view.in_order:
            features = x.as_strided(view.shape, view.strides).flatten(1)
            features = F.relu(features) if hidden.rectifies else features
        else:
            features = packed_features(x, view, config, pool_max=pool_max, rectifies=hidden.rectifies)
        return multiply(features, hidden, weight)


def multiply(features: Tensor, hidden: HiddenLayers, weight: Tensor) -> Tensor:
    """Run the layers before the last one on features [N, F], and multiply by the rows of its weight [K, F], float32."""
    features = hidden.apply(features)
    if features.is_cuda and features.dtype != torch.float32:
        return torch.mm(features, weight.t(), out_dtype=torch.float32)
    return F.linear(features.float(), weight.float())
