"""The launch rule: chooses a LaunchConfig from a head's sizes alone, where no tuned table has the head."""

from dataclasses import replace
from typing import NamedTuple

import torch

from .head_shape import HeadShape
from .launch_config import MOST_TILES, ROW_UNIT, WEIGHT_BUFFERS, LaunchConfig, next_power_of_2

#: Classes up to which a head counts as one of few classes.
FEW_CLASSES = 128
#: Programs that share the features of a tile of float32, at most.
_MOST_SUMS = 8


def config_by_rule(shape: HeadShape) -> LaunchConfig:
    """Choose the configuration of a head from its sizes, pool and dtype; a pure function.

    The constants are what was best, or near it, for the taps of ResNet-18 at batch 1 to 128 on an H200.
    """
    samples, classes = shape.samples, shape.classes
    if shape.grid_h == shape.grid_w == 1 and _spreads_weight(samples, classes, shape.width):
        return _spread(shape)
    if _tiling_pays(samples, classes):
        return _tiled(shape, _pooling(shape, only_pools=True))
    return _split(shape, _pooling(shape, only_pools=classes <= FEW_CLASSES))


def config_of_norm(shape: HeadShape) -> LaunchConfig:
    """Choose the configuration of a head with a LayerNorm: programs that multiply have all features of one sample."""
    features = shape.channels * shape.view.positions
    block_f = min(max(next_power_of_2(features), 16), 512)
    block_k = min(max(8192 // block_f, 16), 64)
    return replace(
        _pooling(shape, only_pools=True), block_n=1, block_f=block_f, block_k=block_k, block_s=1, weight_buffers=0
    )


def waits_by_rule(samples: int, classes: int) -> bool:
    """Return whether the last of a sample's programs waits for the others, if several: not for very many numbers."""
    return samples < 64 and classes <= FEW_CLASSES


def _tiling_pays(samples: int, classes: int) -> bool:
    """Return whether to multiply 16 samples at a time: the weight is read once instead of 16 times, but programs wait.

    Beside the trunk the traffic counts, not the wait: with 8 heads of 1,000 classes ResNet-18 takes 6.8 % longer than
    without for 32 samples instead of 11.0 %, but 10.8 % instead of 7.5 % for 8 (H200).
    """
    return samples >= 32 and classes >= 128


def _spreads_weight(samples: int, classes: int, window_w: int) -> bool:
    """Return whether programs that multiply share the rows of the weight, each for one sample.

    So a head is soonest done, but more programs wait. It pays for the heads of the last maps, which have no
    convolutions left to hide behind: ResNet-18 with 8 heads of 1,000 classes takes 164 us instead of 169 at batch 1,
    and 167 if those of larger maps are launched so, too (H200).
    """
    return samples < 4 and classes > FEW_CLASSES and 16 <= window_w <= 64


def _spread(shape: HeadShape) -> LaunchConfig:
    """Configure programs that multiply some rows of the weight each with all features of one sample."""
    block_f = min(max(next_power_of_2(shape.channels), 16), 512)
    return LaunchConfig(
        block_n=1,
        block_c=16,
        block_p=1,
        block_a=next_power_of_2(shape.width),
        block_f=block_f,
        block_k=min(max(8192 // block_f, 16), 64),
        block_s=1,
        block_j=_softmax_block(shape),
        window_parts=1,
        stages=1,
        num_warps=8,
    )


def _tiled(shape: HeadShape, pooling: LaunchConfig) -> LaunchConfig:
    """Configure programs that multiply groups of 16 samples."""
    samples, classes, element_size = shape.samples, shape.classes, _element_size(shape)
    features = shape.channels * shape.view.positions
    block_k = min(max(next_power_of_2(classes), 16), 64)
    block_f = max(min((256 if samples < 64 else 128) // element_size, next_power_of_2(features)), 16)
    sums = 1 if features < 256 else 2 if features < 1024 else 4
    if element_size == 4:  # added up one after another, 512 features leave 6 times the error of 8 parts
        while 2 * sums * block_f <= features and sums < _MOST_SUMS:
            sums *= 2
    else:
        while sums > 1 and -(-samples // 16) * -(-classes // block_k) * sums > MOST_TILES:
            sums //= 2
    # Triton reads ahead what it can read in vectors, and waits for maps in more parts in a loop of its own
    reads_ahead = (
        features > sums * block_f and element_size < 4 and features % ROW_UNIT == 0 and pooling.window_parts <= 4
    )
    return replace(
        pooling,
        block_n=16,
        block_f=block_f,
        block_k=block_k,
        block_s=sums,
        weight_buffers=WEIGHT_BUFFERS if reads_ahead else 0,
    )


def _split(shape: HeadShape, pooling: LaunchConfig) -> LaunchConfig:
    """Configure programs that multiply what they have pooled."""
    view, classes, block_j = shape.view, shape.classes, pooling.block_j
    block_features = pooling.block_c * pooling.block_p
    has_all = shape.channels <= pooling.block_c and view.positions <= pooling.block_p and pooling.window_parts == 1
    if has_all and block_j * block_features <= 8192:
        block_k = block_j  # one program may multiply all of a sample
    else:
        block_k = min(max(next_power_of_2(classes), 16), max(16384 // max(block_features, 16), 16))
    splits = pooling.splits_of(view)
    return replace(
        pooling,
        block_k=block_k,
        block_s=min(next_power_of_2(splits), max(8192 // block_j, 1), 64),
        waits=waits_by_rule(shape.samples, classes) and splits > 1,
    )


def _pooling(shape: HeadShape, *, only_pools: bool) -> LaunchConfig:
    """Choose how programs pool, and the softmax's block; the fields of the product are left at 1."""
    view, samples, channels = shape.view, shape.samples, shape.channels
    positions, window_w = view.positions, view.window_w
    columns, features = view.window_h * window_w, channels * positions
    # wide blocks of channels read whole lines of memory, but leave fewer programs, each with more of the weight
    block_f = 16
    least = 64 if only_pools else 256
    while block_f < 64 and (only_pools or columns <= 1024) and samples * features >= least * block_f:
        block_f *= 2
    while block_f < 512 and features >= 512 * block_f:
        block_f *= 2
    block_p = min(next_power_of_2(positions), block_f)
    block_c = min(block_f // block_p, next_power_of_2(channels))
    pool = _Pool(
        block_c,
        max(8192 // (block_c * block_p), 1),
        num_warps=4 if only_pools and columns <= 256 else 8,
        stages=1,
        enough=64 if not only_pools else 128 if samples < 16 else 256,
    )
    if positions == 1 and window_w >= 16 and block_f <= 64:
        pool = _global_pool(samples, channels, window_w, shape.classes, _element_size(shape)) or pool
    block_c = min(pool.block_c, next_power_of_2(channels))
    block_a = min(pool.block_a, next_power_of_2(window_w))
    # Programs enough to read a large map through many SMs at once, each with more than one step.
    window_parts = 1
    programs = -(-channels // block_c) * -(-positions // block_p) * samples
    while (
        shape.pool != "max"
        and programs * window_parts < pool.enough
        and window_w >= 2 * window_parts * block_a
        and window_parts < 64
    ):
        window_parts *= 2
    return LaunchConfig(
        1, block_c, block_p, block_a, 1, 1, 1, _softmax_block(shape), window_parts, pool.stages, pool.num_warps
    )


class _Pool(NamedTuple):
    """Choices of the programs that pool: fields of a LaunchConfig, and how many programs are enough."""

    block_c: int
    block_a: int  # at most
    num_warps: int
    stages: int
    enough: int  # programs; windows are divided where there are fewer


def _global_pool(samples: int, channels: int, window_w: int, classes: int, element_size: int) -> _Pool | None:
    """Choose how maps are pooled to one position a channel: what was best, or near it, beside the trunk of ResNet-18.

    Small programs find room between convolutions; of many samples, one program each meets no others. None: as others.
    """
    line = 128 // element_size  # channels that a line of memory holds
    if classes > FEW_CLASSES:
        if samples >= 32:
            if samples < 64:
                return _Pool(line, 64, 8, 1, 128)
            return _Pool(line, 64, 4, 4, 256) if window_w > 64 else _Pool(512, 16, 4, 1, 0)
        return _Pool(64, 128, 8, 1, 16) if 4 <= samples < 16 and window_w > 64 else None
    if samples >= 64 and classes <= 16 and 128 <= channels <= 512 and window_w <= 1024:
        return _Pool(512, 64 if channels <= 128 else 32 if channels <= 256 else 8, 4, 4, 0)
    if samples >= 16:
        return _Pool(line, 64, 4, 4, 256)
    if window_w > 1024:
        return _Pool(16, 512, 8, 1, 128)
    if window_w > 256:
        return _Pool(16, 128, 4, 4, 0)
    if window_w > 64:
        return _Pool(16, 64, 8, 1, 0)
    return _Pool(64, 16, 4, 4, 0) if samples < 4 else _Pool(32, 16, 8, 1, 0)


def _softmax_block(shape: HeadShape) -> int:
    return min(next_power_of_2(shape.classes), 1024)


def _element_size(shape: HeadShape) -> int:
    return int(getattr(torch, shape.dtype).itemsize)
