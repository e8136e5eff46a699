"""Features that a launch of its own packs, pooled or in the weight's order, before the launch that decides."""

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
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

#: Warps of a program: of blocks as the rule chooses them, two or eight were hardly ever sooner (112 heads, H100).
WARPS = 4
#: Constants and compiled kernel of launches, by all that they depend on.
_compiled: dict[tuple[Hashable, ...], tuple[PackConstants, Any]] = {}


def packed_features(x: Tensor, view: HeadView, config: LaunchConfig, *, pool_max: bool, rectifies: bool) -> Tensor:
    """Launch what packs a head's features [N, features] in x's dtype, and return them.

    ``view`` is that of x; features are of its ReLU if the head ``rectifies``.
    """
    samples, channels, height, width = view.shape
    features = torch.empty(samples, channels * view.positions, dtype=x.dtype, device=x.device)
    key = (x.device, x.dtype, view, x.data_ptr() % 16, config, pool_max, rectifies)
    constants, compiled = _compiled.get(key) or (None, None)
    if constants is None:
        constants = PackConstants.of(config, view, pool_max=pool_max, rectifies=rectifies)
    programs = samples * -(-channels // config.block_c) * -(-view.positions // config.block_p)
    sizes = (channels, height, width, view.grid_h, view.grid_w, view.window_h, view.window_w)
    with torch.cuda.device_of(x):
        options = {} if compiled else {"num_warps": WARPS}
        arguments = ((x, *view.strides), features, sizes, (constants,))
        _compiled[key] = constants, launch(kernel.pack_kernel, (programs, 1, 1), arguments, options, compiled)
    return features


def head_of_packed(
    view: HeadView, config: LaunchConfig, hidden: HiddenLayers
) -> tuple[HeadView, LaunchConfig, HiddenLayers]:
    """Return view, configuration and layers of the head whose input are packed features, in place of those of x."""
    features = view.shape[1] * view.positions
    vectors = HeadView((view.shape[0], features, 1, 1), (features, 1, 0, 0), 1, 1)
    config = replace(config, features="in place", block_c=config.block_f, block_p=1, block_a=1, stages=1)
    return vectors, config, hidden._replace(rectifies=False)
