"""The rule of programs that pool: blocks of channels, of positions and of a window's elements."""

from dataclasses import replace
from typing import NamedTuple

from .head_shape import HeadShape
from .launch_config import LaunchConfig, next_power_of_2

#: Classes up to which a head counts as one of few classes.
FEW_CLASSES = 128


def pooling(shape: HeadShape, *, only_pools: bool) -> LaunchConfig:
    """Choose how programs pool, and the softmax's block; the product's fields are 1.

    only_pools: of programs that only pool, or do little else.
    """
    view, samples, channels = shape.view, shape.samples, shape.channels
    positions, window_w = view.positions, view.window_w
    elements, features = view.window_h * window_w, shape.features  # of a window
    enough = 64 if not only_pools else 128 if samples < 16 else 256
    if positions > 1:
        pool, block_p = _windows(shape, elements, enough)
        window_w = elements  # its elements lie in one row for the kernel
    else:
        # wide blocks of channels read whole lines of memory, but leave fewer programs, each with more of the weight
        block_f, block_p = 16, 1
        least = 64 if only_pools else 256
        while block_f < 64 and (only_pools or elements <= 1024) and samples * features >= least * block_f:
            block_f *= 2
        while block_f < 512 and features >= 512 * block_f:
            block_f *= 2
        block_c, num_warps = min(block_f, next_power_of_2(channels)), 4 if only_pools and elements <= 256 else 8
        pool = _Pool(block_c, 8192 // block_c, num_warps, stages=1, enough=enough)
        if elements == 1:
            pool = _Pool(128, 1, 2 if shape.classes <= 16 else num_warps, stages=1, enough=0)
        elif shape.classes > FEW_CLASSES and only_pools and elements <= 64 and samples >= 4:
            pool = _Pool(32, 16, 8, stages=1, enough=0)
        if window_w >= 16 and block_f <= 64:
            pool = _global_pool(shape, window_w) or pool
    block_c = min(pool.block_c, next_power_of_2(channels))
    block_a = min(pool.block_a, next_power_of_2(window_w))
    # Programs enough to read a large map through many SMs at once, each with more than one step.
    window_parts = 1
    parts = shape.pool == "avg" and (positions == 1 or elements >= 128)
    most = min(window_w // block_a, 64) if parts else 1
    programs = -(-channels // block_c) * -(-positions // block_p) * samples
    while programs * window_parts < pool.enough and 2 * window_parts <= most:
        window_parts *= 2
    if shape.pool == "max" and positions == 1 and window_w > 1024:  # of which there are no parts: fewer channels
        while programs < pool.enough and block_c > 1:
            block_c, block_a, programs = block_c // 2, min(2 * block_a, 512), 2 * programs
    # of one step nothing is read ahead, and number by number nothing should be: 32 x 257 x 561 in float32 took 89 us,
    # by a library behind a launch that pools 16 (H200)
    in_vectors = (channels if shape.layout == "channels_last" else shape.width) * shape.element_size % 16 == 0
    stages = pool.stages if block_a * window_parts < window_w and in_vectors else 1
    block_j = min(next_power_of_2(shape.classes), 1024)
    return LaunchConfig(1, block_c, block_p, block_a, 1, 1, 1, block_j, window_parts, stages, pool.num_warps)


def _windows(shape: HeadShape, elements: int, enough: int) -> "tuple[_Pool, int]":
    """Choose how windows of so many elements are pooled, and how many a program has of each channel."""
    features = shape.samples * shape.features
    if shape.layout == "channels_last":  # whole lines where programs are enough
        block_a, block_p = min(next_power_of_2(elements), 16), min(next_power_of_2(shape.view.positions), 4)
        block_c = 16 if features < 8192 else 64 // shape.element_size
        while block_c * block_p < 256 and features >= 512 * block_c * block_p:
            block_c *= 2
    elif elements >= 256 and 4 < shape.view.positions < 16 and shape.samples > 1 and features < 1 << 16:
        block_c, block_p, block_a = 16, 1, 64  # in a block of 16 windows some idle
    else:
        block_a, block_p = min(next_power_of_2(elements), 64), min(next_power_of_2(shape.view.positions), 16)
        block_c = 4096 // (block_p * max(block_a, 2))
        programs = shape.samples * -(-shape.view.positions // block_p)
        least = 32 if block_a <= 16 else 16  # sooner, if of many positions and in few steps
        while block_p == 16 and block_c < least and programs * shape.channels >= 200 * block_c:
            block_c *= 2
        while block_c * block_p * block_a > 8192:  # of more, a thread's registers do not hold all
            block_a //= 2
    small = shape.layout == "channels_last" and shape.samples >= 8 and shape.classes <= 16
    return _Pool(block_c, block_a, 2 if small else 4, stages=1, enough=enough), block_p


def packing(shape: HeadShape, config: LaunchConfig) -> LaunchConfig:
    """Choose the blocks of a launch that packs features, in a configuration of what multiplies them."""
    view, channels, size = shape.view, shape.channels, shape.element_size
    maps, positions, elements = shape.samples * channels, view.positions, view.window_h * view.window_w
    features = maps * positions
    stages = block_p = block_a = 1
    if view.unpooled:  # put in order
        block_c, block_p = (16, 64) if features >= 1 << 24 else (64, 64) if features >= 1 << 20 else (32, 32)
    elif positions == 1 and shape.layout == "channels_last":
        in_vectors = channels >= 64 and channels * size % 16 == 0
        if elements >= 512 and channels <= 32:  # more programs, and each its whole sectors
            block_c, block_a = 8, 256
        elif elements >= 512 and shape.pool == "avg" and in_vectors and maps >= 512:
            block_c, block_a, stages = 64, 32, 4
        else:
            block_c, block_a = (64, 64) if maps >= 1 << 16 else (32, 512 if maps < 512 else 128)
    elif positions == 1 and elements > 512 and (maps < 1 << 13 or maps * elements * size >= 48 << 20):
        block_c, block_a, stages = 8, 256, 4
    elif positions == 1:
        small = elements > 64 or maps < 1 << 13
        block_c, block_a = (16, 64) if small else (128, 32) if maps < 1 << 16 else (128, 16)
        block_a = block_a if small or elements % block_a == 0 else 4  # of 49 elements 52 are read, and not 64
    elif shape.layout == "channels_last":
        if features < 1 << 15:
            block_c, block_p, block_a = 16, 4, 16
        elif channels <= 64:
            block_c, block_p, block_a = (64, 8, 16) if elements >= 32 else (64, 16, 4)
        elif channels * size % 16 != 0 or (size == 4 and elements < 100):
            block_c, block_p, block_a = 64, 8, 8
        elif size == 4:
            block_c, block_p, block_a = 32, 4, 16
        else:
            few = positions <= 4 or elements >= 100
            block_c, block_p, block_a = (128, 4, 16) if few or features < 1 << 17 else (128, 8, 8)
    elif elements >= 256 and 4 < positions < 16 and shape.samples > 1 and features < 1 << 16:  # see ``_windows``
        block_c, block_a = 16, 64
    else:
        block_p, blocks = 4 if positions <= 4 else 16, maps * -(-positions // 16)
        if blocks < 1 << 10:
            block_c, block_a = 4, 64
        elif block_p == 4:
            block_c, block_a = (16, 8) if blocks < 1 << 14 else (64, 8)
        else:
            block_c, block_a = (16, 16) if blocks < 1 << 13 else (32, 8) if blocks < 1 << 14 else (32, 4)
    return replace(
        config,
        block_c=min(block_c, next_power_of_2(channels)),
        block_p=block_p if view.unpooled else min(block_p, next_power_of_2(positions)),
        block_a=min(block_a, next_power_of_2(elements if positions > 1 else view.window_w)),
        stages=stages,
    )


class _Pool(NamedTuple):
    """Choices of the programs that pool: fields of a LaunchConfig, and how many programs are enough."""

    block_c: int
    block_a: int  # at most
    num_warps: int
    stages: int
    enough: int  # programs; windows are divided where there are fewer


def _global_pool(shape: HeadShape, columns: int) -> _Pool | None:
    """Choose how maps are pooled to one position a channel: what was best, or near it, alone. None: as others.

    But of 64 samples and more with up to 16 classes one program each of middling maps: beside the trunk of ResNet-18
    it meets no others.
    """
    samples, channels = shape.samples, shape.channels
    if samples < 16 and shape.layout == "channels_last" and channels * shape.element_size % 16 != 0:
        if shape.classes > FEW_CLASSES and samples >= 4:  # each number has an address in registers
            return _Pool(16, 64, 8, 1, 0)
        if samples < 4 and columns <= 64:
            return _Pool(16, 16, 4, 4, 0)
    line = 128 // shape.element_size  # channels that a line of memory holds
    if shape.classes > FEW_CLASSES:
        return _pool_of_many_classes(shape, columns, line)
    if shape.layout == "contiguous" and columns <= 64:  # each channel has lines of its own
        return _Pool(64, 8, 4, 1, 0)
    if shape.layout == "contiguous" and columns > 256 and samples >= 64 and shape.width % 2 != 0:
        return _Pool(16, 256, 4, 1, 0)  # number by number, in long pieces
    if shape.layout == "contiguous" and columns <= 1024:
        many = _Pool(64, 32 if columns <= 256 else 64, 4, 4, 0)
        return many if samples >= 64 else _pool_of_few_samples(shape, columns)
    if samples >= 64 and shape.classes <= 16 and 128 <= channels <= 512 and columns <= 1024:
        return _Pool(512, 64 if channels <= 128 else 32 if channels <= 256 else 8, 4, 4, 0)
    if samples >= 16:
        return _Pool(line, 32, 2, 4, 256) if samples < 64 and columns <= 1024 else _Pool(line, 64, 4, 4, 256)
    return _pool_of_few_samples(shape, columns)


def _pool_of_many_classes(shape: HeadShape, columns: int, line: int) -> _Pool | None:
    """Choose for programs that others wait for, in groups of samples where there are several."""
    samples = shape.samples
    if shape.layout == "contiguous" and columns > 64 and (samples >= 32 or 4 <= samples < 16):
        return _Pool(16, 64, 4, 1, 256) if samples >= 32 else _Pool(16, 128, 4, 1, 16)
    if columns <= 64:
        return _Pool(512, 2, 8, 1, 0) if samples >= 64 else _Pool(128, 4, 8, 1, 128) if samples >= 32 else None
    if samples >= 64:
        return _Pool(line, 64, 4, 4, 256)
    if samples >= 32:
        return _Pool(line, 64, 8, 1, 128) if columns <= 256 else _Pool(32, 128, 4, 4, 128)
    return _Pool(32, 64, 8, 1, 16) if samples >= 4 else None


def _pool_of_few_samples(shape: HeadShape, columns: int) -> _Pool:
    """Choose for few classes: small programs, more of them the larger the map."""
    few, channels = shape.samples < 4, shape.channels
    if columns > 1024:
        return _Pool(32, 128, 4, 4, 64 if few else 128)
    if columns > 256:
        return _Pool(16 if channels < 512 or few else 32, 128, 4, 4, 0)
    if columns > 64:
        if channels >= 1024 and not (few and shape.classes <= 16):
            return _Pool(64, 128, 4, 1, 0)
        return _Pool(16, 64, 8 if few and shape.classes <= 16 else 4, 1, 0)
    if few:
        return _Pool(64, 16, 4, 4, 0)
    return _Pool(32, 16, 4, 1, 0) if channels < 1024 else _Pool(64, 16, 2, 4, 0)
