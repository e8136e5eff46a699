"""Work before the launch that decides: features pooled or put in order by one launch, or logits by a library."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch.constants import PackConstants, PackLaunchConstants
from .launch.head_view import HeadView
from .launch.launch_config import LaunchConfig
from .noted import launch
from .reference.hidden_layers import HiddenLayers

#: Warps of a program: two or eight were hardly ever sooner (blocks by rule of 112 heads, H100, in no record).
WARPS = 4
#: Bytes of maps beyond which the last one is packed first: the trunk has just written it, so that some of it is in
#: the cache still. 192 MB of ResNet-18 at batch 128 then cost 4.7 % of its time and not 6.6; of fewer it is a loss, 48
#: MB at batch 32 cost 7.4 and not 4.2 (H100, in no record).
_LARGE_MAPS = 64 << 20
#: Constants and compiled kernel of launches, by all that they depend on.
_compiled: dict[tuple[Hashable, ...], tuple[PackLaunchConstants, Any]] = {}


class HeadInput(NamedTuple):
    """A head, with the last layer's weight, and its input x with its view: what work before its launch depends on."""

    x: Tensor
    view: HeadView
    weight: Tensor
    bias: Tensor | None
    hidden: HiddenLayers
    config: LaunchConfig
    pool_max: bool

    @property
    def packs(self) -> bool:
        """Whether its features are packed, for programs that multiply or for a library."""
        return self.config.packs or (self.config.by_library and not self.view.in_weight_order)


def run_before_launch(heads: Sequence[HeadInput]) -> list[Tensor]:
    """Run what comes before a launch; return what it reads of each head: x, packed features or a library's logits."""
    packing = [head for head in heads if head.packs]
    order = -1 if sum(head.x.nbytes for head in packing) > _LARGE_MAPS else 1
    packed = iter(packed_features(packing[::order])[::order] if packing else [])
    read = [next(packed) if head.packs else head.x for head in heads]
    return [logits_by_library(head, x) if head.config.by_library else x for head, x in zip(heads, read, strict=True)]


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


def packed_features(heads: Sequence[HeadInput]) -> list[Tensor]:
    """Pack features of heads, of the ReLU of x if a head ``rectifies``, by one launch; return each, [N, F] like x."""
    from .jit import pack as kernel  # there is no Triton for some platforms

    found, packed, starts, device = [], [], [0], heads[0].x.device
    key: tuple[Hashable, ...] = (device,)
    for x, view, _, _, hidden, config, pool_max in heads:
        samples, channels = view.shape[:2]
        found.append(torch.empty(samples, channels * view.positions, dtype=x.dtype, device=device))
        packed.append(((x, *view.strides), found[-1], view.sizes))
        starts.append(starts[-1] + samples * -(-channels // config.block_c) * -(-view.positions // config.block_p))
        key += (x.dtype, view, x.data_ptr() % 16, config, pool_max, hidden.rectifies)
    constants, compiled = _compiled.get(key) or (None, None)
    if constants is None:
        constants = PackLaunchConstants(
            tuple(PackConstants.of(h.config, h.view, pool_max=h.pool_max, rectifies=h.hidden.rectifies) for h in heads)
        )
    with torch.cuda.device_of(heads[0].x):
        options = {} if compiled else {"num_warps": WARPS}
        arguments = (tuple(packed), tuple(starts) if heads[1:] else None, constants)
        _compiled[key] = constants, launch(kernel.pack_kernel, (starts[-1], 1, 1), arguments, options, compiled)
    return found


@torch.no_grad()
def logits_by_library(head: HeadInput, x: Tensor) -> Tensor:
    """Return a head's logits [N, K], float32, mostly without the bias; x is its input, or its packed features.

    Whatever is between the head's layers is rounded to x's dtype, as in PyTorch; the logits are not.
    """
    with torch.autocast(x.device.type, enabled=False):
        if not head.packs:
            x = x.as_strided(head.view.shape, head.view.strides).flatten(1)
            x = F.relu(x) if head.hidden.rectifies else x
        x = head.hidden.apply(x)
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, head.weight.t(), out_dtype=torch.float32)
        return F.linear(x.float(), head.weight.float(), head.bias if library_adds_bias(head.config, x) else None)


def library_adds_bias(config: LaunchConfig, x: Tensor) -> bool:
    """Return whether a library adds the last layer's bias: to one sample in float32, with another kernel of its own."""
    # 63 us and not 81 for 44,748 features and 972 classes; but of 32 samples, 4,704 features and 5,823 classes the
    # product took 185 us with a bias, 75 without (H100, in no record)
    return config.by_library and x.dtype == torch.float32 and len(x) == 1
