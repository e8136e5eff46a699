"""The launch rule: chooses a LaunchConfig from a head's sizes alone, where no tuned table has the head."""

from dataclasses import replace

from .head_shape import HeadShape
from .launch_config import MOST_TILES, ROW_UNIT, WEIGHT_BUFFERS, LaunchConfig, next_power_of_2
from .pooling_rule import FEW_CLASSES, packing, pooling

#: Bytes of a weight from about which on reading it once for all samples pays for features that lie in memory first.
_LARGE_WEIGHT = 2 << 20
#: Features and products up to which a head of which nothing is pooled is split; of more of either it is read.
_FEW_FEATURES, _FEW_PRODUCTS = 512, 16384
#: Classes up to which no launch puts a channels-last map in order first: of one or two samples it is split, of more
#: than 64 read in place.
_FEW_TURNED = 64
#: Classes beyond which features are read and, of up to 8 samples, several programs decide about each; see
#: ``_in_slices``. Beyond half as many pooled maps are read, and tiles are not of 32 rows.
_MANY_CLASSES = 4096
#: Programs that fill a GPU: an H100 or H200 has so many SMs.
_PROGRAMS = 132
#: Bytes of a step of the product, and of all that lie in shared memory, as much as small GPUs have: four such steps.
_STEP_BYTES, _SHARED_BYTES = 24 << 10, 98 << 10


def config_by_rule(shape: HeadShape) -> LaunchConfig:
    """Choose the configuration of a head from its sizes, pool and dtype; a pure function.

    The constants are what was best, or near it, in sweeps of ResNets' heads (autotune/records/h200/sweep.jsonl.gz) and
    of the broad set on an H200, and for some 4,000 heads drawn at random, on H100s and H200s.
    """
    samples, classes, features = shape.samples, shape.classes, shape.features
    pools = pooling(shape, only_pools=True)
    many = features > _FEW_FEATURES or features * classes > _FEW_PRODUCTS
    if shape.view.turned and samples <= 2 and features <= 1 << 15 and classes <= _FEW_TURNED:
        return config_of_split(shape, replace(pools, block_c=16, block_p=16, block_a=1, num_warps=8))
    vector = shape.view.in_weight_order and shape.view.positions == 1
    if vector and shape.dtype == "float32" and samples == 1 and classes <= 16 and features <= 1 << 16:
        return config_of_split(shape, replace(pools, block_c=512))
    if (shape.view.unpooled and many) or _reading_pays(shape):
        return config_of_reading(shape, _where(shape))
    if _spreads_weight(shape):
        if shape.view.positions == 1 and shape.width <= 256:
            block_a = 16 if shape.width <= 64 else 256
            pools = replace(pools, block_c=16, block_a=block_a, window_parts=1, stages=1, num_warps=8)
        return _single(shape, pools, shared=True)
    if _tiling_pays(shape) or _few_features(shape):
        return _tiled(shape, pools)
    return config_of_split(shape, pooling(shape, only_pools=classes <= FEW_CLASSES))


def config_beside_trunk(shape: HeadShape, config: LaunchConfig) -> LaunchConfig:
    """Return what takes the place of a configuration where a network's trunk runs beside the head: mostly the same.

    But before many classes, in half precision, programs that multiply what others pool (tiled) take room from the trunk
    while they wait: features of 16 samples and more are packed instead, and of 4 to 15 multiplied by who pools.
    """
    # eight heads of 1,000 classes add to ResNet-18 at batch 128 6.6 % and not 8.7, sixteen to ResNet-50 at 32 13.2 and
    # not 19.6 (H100; without, in no record)
    many = shape.classes > 2 * FEW_CLASSES and shape.element_size == 2  # float32 takes more registers
    if many and shape.samples >= 16 and config.tiled and not config.reads:
        return config_of_reading(shape, "packed")
    if not (many and 4 <= shape.samples < 16 and config.tiled and config.block_n == 1):
        return config
    pools = pooling(shape, only_pools=False)
    if shape.view.positions == 1 and shape.pool == "avg":
        block_c, block_a = min(64, next_power_of_2(shape.channels)), min(128, next_power_of_2(shape.width))
        enough = 16 // (shape.samples * -(-shape.channels // block_c))
        parts = 1 << max(min(enough, shape.width // block_a), 1).bit_length() - 1
        pools = replace(pools, block_c=block_c, block_a=block_a, window_parts=parts, stages=1, num_warps=8)
    return config_of_split(shape, pools)


def _few_features(shape: HeadShape) -> bool:
    """Return whether tensor cores multiply features that are sent to them, since these are few beside the classes."""
    if shape.view.unpooled or shape.dtype == "float32" or shape.features % ROW_UNIT != 0 or shape.samples >= 32:
        return False
    if shape.view.positions > 1:
        return shape.features <= 1024 and shape.classes > 16
    return shape.features <= 64 and shape.width <= 256 and shape.samples >= 4 and shape.classes >= 512


def _where(shape: HeadShape) -> str:
    """Return where features are read: in place if they lie in order, or in blocks that are turned while they are."""
    many = shape.samples > 64 and shape.classes <= _FEW_TURNED and shape.dtype != "float32"
    return "in place" if shape.view.in_weight_order or (shape.view.turned and many) else "packed"


def _reading_pays(shape: HeadShape) -> bool:
    """Return whether features are to lie in memory first: where the weight is large it is read once for all samples.

    Windows are pooled sooner by programs that do nothing else. Tensor cores take float32 from memory alone.
    """
    samples, classes, weight = shape.samples, shape.classes, weight_bytes(shape)
    pooled = samples * shape.features
    if classes > _MANY_CLASSES:
        return True
    if shape.view.positions > 1:
        most_pooled = pooled > 1 << (18 if shape.layout == "channels_last" or samples < 32 else 16)
        large = classes > FEW_CLASSES or weight >= _LARGE_WEIGHT // 2 or most_pooled
        large |= pooled * classes >= 1 << (19 if classes > 64 else 20)
        few_large = samples < 4 and shape.layout == "contiguous" and shape.view.window_h * shape.view.window_w >= 256
        large |= few_large and classes > 16
        return large and not _few_features(shape)
    small = shape.layout == "contiguous" and shape.view.window_w <= 64
    odd = shape.layout == "channels_last" and shape.channels * shape.element_size % 16 != 0 and samples >= 64
    if (small and pooled >= 1 << 16) or (odd and classes > 16 and shape.features >= 256):
        return True  # of odd channels, too, who only packs reads soonest
    if samples >= 32 and classes >= FEW_CLASSES:
        if pooled * shape.view.window_w >= 1 << (22 if shape.features >= 512 and shape.view.window_w > 64 else 23):
            return True
        if shape.layout == "contiguous" and shape.dtype != "float32":
            return small and samples >= 64 and samples * weight >= 48 * _LARGE_WEIGHT
        return shape.dtype == "float32" or weight >= _LARGE_WEIGHT
    large = weight >= (_LARGE_WEIGHT if samples >= 2 or classes > 1024 else 8 * _LARGE_WEIGHT)
    return large or classes > _MANY_CLASSES // 2 or samples * weight >= (8 if classes > 64 else 32) * _LARGE_WEIGHT


def config_of_norm(shape: HeadShape) -> LaunchConfig:
    """Choose the configuration of a head with a LayerNorm: programs have all features of a sample, or read them."""
    if shape.samples * weight_bytes(shape) >= 2 * _LARGE_WEIGHT or shape.features >= 8192:
        return config_of_reading(shape, _where(shape))
    return _single(shape, pooling(shape, only_pools=True), shared=False)


def _single(shape: HeadShape, pools: LaunchConfig, *, shared: bool) -> LaunchConfig:
    """Configure programs that multiply some rows of the weight each with features of one sample, its own share or all.

    Before a norm each waits for all of them in any case.
    """
    halves = 2 if shared and shape.samples < 4 else 1
    block_f = min(
        max(next_power_of_2(shape.features) // halves, 16), 256 if shared and shape.classes <= FEW_CLASSES else 512
    )
    block_k = min(8192 // block_f, 64, max(next_power_of_2(shape.classes), 16))
    shares = min(next_power_of_2(-(-shape.features // block_f)), 16) if shared else 1
    return replace(pools, block_f=block_f, block_k=block_k, block_s=shares, num_warps=max(pools.num_warps, 4))


def waits_by_rule(classes: int) -> bool:
    """Return whether the last of a sample's programs waits for the others, if several: for few numbers alone."""
    return classes <= FEW_CLASSES


def _tiling_pays(shape: HeadShape) -> bool:
    """Return whether to multiply 16 samples at a time: the weight is read once, not 16 times, but programs wait."""
    few = shape.samples < 4 or (shape.samples < 16 and shape.features <= 256)
    enough = shape.classes >= FEW_CLASSES if shape.samples >= 32 else shape.classes >= 2 * FEW_CLASSES and not few
    return enough and shape.element_size == 2  # tensor cores take float32 from memory alone


def _spreads_weight(shape: HeadShape) -> bool:
    """Return whether programs that multiply share the rows of the weight, each for one sample: sooner, alone."""
    samples, classes, features = shape.samples, shape.classes, shape.features
    if shape.view.positions > 1:
        return samples < 4 and classes > 16 and features >= 1024
    if _few_features(shape):
        return False
    if samples < 4:
        return shape.width >= 16 and classes > (16 if shape.width > 1024 else FEW_CLASSES)
    return samples < 16 and shape.width >= 64 and classes > 2 * FEW_CLASSES and features <= 256


def _tiled(shape: HeadShape, pools: LaunchConfig) -> LaunchConfig:
    """Configure programs that multiply groups of 16 samples, in half precision."""
    samples, classes, features = shape.samples, shape.classes, shape.features
    if shape.view.positions > 1:  # to add parts of windows up takes more registers than a thread has
        pools = replace(pools, window_parts=1)
    block_k, block_f = min(next_power_of_2(classes), 64), max(min(128, next_power_of_2(features)), 16)
    sums = 1 if features < 256 else 2 if features < (512 if samples < 64 else 1024) else 4
    while sums > 1 and -(-samples // 16) * -(-classes // block_k) * sums > MOST_TILES:
        sums //= 2
    # Triton reads ahead what it can read in vectors, and not past a loop that waits for parts
    in_vectors = features % ROW_UNIT == 0 and pools.window_parts <= 4
    buffers = WEIGHT_BUFFERS if in_vectors and features > sums * block_f else 0
    pools = replace(pools, num_warps=max(pools.num_warps, 4), weight_buffers=buffers)
    return replace(pools, block_n=16, block_f=block_f, block_k=block_k, block_s=sums)


def config_of_split(shape: HeadShape, pools: LaunchConfig) -> LaunchConfig:
    """Configure programs that multiply what they have pooled."""
    classes, block_j, splits = shape.classes, pools.block_j, pools.splits_of(shape.view)
    block_features = pools.block_c * pools.block_p
    if splits == 1 and block_j * block_features <= 8192:
        block_k = block_j  # one program may multiply all of a sample
    else:
        block_k = min(max(next_power_of_2(classes), 16), max(16384 // max(block_features, 16), 16))
    block_s = min(next_power_of_2(splits), max(8192 // block_j, 1), 64)
    return replace(pools, block_k=block_k, block_s=block_s, waits=waits_by_rule(classes) and splits > 1)


def config_of_reading(shape: HeadShape, features: str) -> LaunchConfig:
    """Configure programs that multiply features that lie in memory: in place, or packed by a launch before."""
    if features == "packed":
        return packing(shape, replace(config_of_reading(shape.of_vectors, "in place"), features="packed"))
    size, rows, total = shape.element_size, shape.classes, shape.features
    block_n, block_k, num_warps = _tile_of_reading(shape)
    tiles = -(-shape.samples // block_n) * -(-rows // block_k)
    step = size * (block_n + block_k)  # bytes of a feature of the weight and the samples
    most = 64 * 128 if num_warps == 4 and not (_in_slices(shape) and total % 8 == 0) else 128 * 128
    line = 128 // size  # elements of a line of memory
    block_f = 32 if block_n * block_k >= most else 2 ** (min(_STEP_BYTES // step, 2 * line).bit_length() - 1)
    if _in_slices(shape) and size == 2 and total % 8 != 0:  # each number has an address of its own in registers
        small_tile = total % 2 != 0 and block_n * block_k <= 1024
        block_f = min(block_f, 128 if small_tile else 64 if block_n == 8 else 32)
    few = size == 2 and total % 8 != 0 and total <= 512 and shape.samples >= 64 and rows > 64 and not _in_slices(shape)
    if few or (size == 4 and total % 4 == 2):
        block_f = min(block_f, 32)
    if block_f > line and 2 * block_f > total // max(_PROGRAMS // tiles, 1):
        block_f //= 2
    block_c, block_p, programs = block_f, 1, _PROGRAMS
    fewest = 256 if rows >= 512 and size == 2 else 2 * block_f  # each share sends sums of all classes
    if shape.view.turned:  # sectors of the map's and of the weight's
        block_c, block_p = (64 if step <= 192 else 32) // size, 8
        block_f = fewest = block_c * block_p
        programs *= 2
    elif size == 4 or (rows <= 16 and total >= 1 << 18 and shape.samples < 32):  # of few warps, or of small steps
        programs *= 2
    elif _some_classes(shape) and (total % 2 == 0 or total < 1 << 14) and weight_bytes(shape) < 8 * _LARGE_WEIGHT:
        programs //= 2
    if not shape.view.turned and shape.view.positions > 1:
        block_p = min(block_f, max(next_power_of_2(shape.view.positions), 16 // size))  # fewer do not compile
        block_c = block_f // block_p
    shares = 1
    while not _in_slices(shape) and 2 * shares * tiles <= programs and 2 * shares * fewest <= total:
        shares *= 2
    stages = max(min(_SHARED_BYTES // (step * block_f), 5 if num_warps == 8 else 4), 2)
    if size == 4 and total % 2 != 0:  # number by number takes up to three times as long if read ahead
        stages = 1
    block_j = min(next_power_of_2(rows), 512 if _in_slices(shape) else 8192)
    while shape.samples * -(-rows // block_j) > 3 * _PROGRAMS and block_j < min(next_power_of_2(rows), 8192):
        block_j *= 2
    return LaunchConfig(
        block_n, block_c, block_p, 1, block_f, block_k, shares, block_j, 1, 1, num_warps,
        weight_buffers=stages, features=features,
    )  # fmt: skip


def _tile_of_reading(shape: HeadShape) -> tuple[int, int, int]:
    """Choose samples and rows of a tile of features in memory, and the warps of a program."""
    samples, rows, features, size = shape.samples, shape.classes, shape.features, shape.element_size
    misaligned = size == 2 and features % 8 != 0  # read in vectors of 8 bytes, or in none
    block_n = min(max(next_power_of_2(samples), 8), 64)
    if _in_slices(shape):  # what a tile finds out about its rows takes registers, and time
        # a second group of 64 is not worth while for up to 16 samples
        block_n = min(block_n, 32 if size == 4 or 0 < samples % 64 <= 16 or (misaligned and samples < 64) else 64)
        block_k = 64 if size == 4 or misaligned else 128
        while block_k > 16 and -(-samples // block_n) * -(-rows // block_k) < 3 * _PROGRAMS // 4:
            block_k //= 2
        return block_n, block_k, 4
    large = weight_bytes(shape) >= 2 * _LARGE_WEIGHT and size == 2 and not misaligned
    small = FEW_CLASSES < rows <= _MANY_CLASSES // 2 and features < 512 and size == 2 and not misaligned
    block_k = min(max(next_power_of_2(rows), 16), 128 if large else 32 if small else 64)
    if size < 4 and -(-samples // 128) * -(-rows // block_k) >= _PROGRAMS:
        block_n = 128
    few_warps = size == 4 or (features <= 1024 and not misaligned and block_k <= 64)  # half precision of few steps
    return block_n, block_k, 4 if block_k < 64 or few_warps or _some_classes(shape) else 8


def _some_classes(shape: HeadShape) -> bool:
    """Return whether what many programs send of a tile of classes takes longer than its features."""
    few = shape.samples <= 64 or shape.features % 8 == 0  # of more, and number by number, four warps have no registers
    return 16 < shape.classes <= FEW_CLASSES and shape.element_size == 2 and few


def _in_slices(shape: HeadShape) -> bool:
    """Return whether several programs share the decision about a sample; with many samples one each is enough."""
    # 32 x 192 before 6,126 classes take 7.6 us, and shared 12.2 (H100); of float32 features are shared instead: 16 x
    # 25,088 before 5,000 classes take 206 us and not 382 (H200)
    few = shape.samples <= 8 and (shape.element_size == 2 or shape.features <= 256)
    return shape.classes > (_MANY_CLASSES if few else 2 * _MANY_CLASSES)


def weight_bytes(shape: HeadShape) -> int:
    """Return the bytes of the weight that reads the features."""
    return shape.classes * shape.features * shape.element_size
