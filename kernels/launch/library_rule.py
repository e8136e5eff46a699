"""The rule of heads whose logits a library computes sooner than programs of ours, which then only decide."""

# Found by some 5,000 random heads, each timed in both ways by ``auxhead-tune heads --random`` (H100, H200); 800 of them
# are in autotune/records, random-heads.jsonl.gz of either GPU, the others in no record.

from .head_shape import HeadShape
from .launch_config import LaunchConfig, by_library
from .launch_rule import weight_bytes
from .pooling_rule import packing

_MB = 1 << 20


def config_of_library(shape: HeadShape, classes: int) -> LaunchConfig:
    """Configure a library's product; a launch of its own packs the features of ``shape`` before, if they are pooled."""
    return by_library(classes) if shape.view.in_weight_order else packing(shape, by_library(classes))


def library_pays(shape: HeadShape, config: LaunchConfig, classes: int, *, hidden: bool, norms: bool) -> bool:
    """Return whether PyTorch's operations are to multiply; ``config`` is what programs would do.

    It and ``shape`` are of the first layer, ``classes`` of the last; ``hidden``, ``norms``: it has such a layer before.
    """
    samples, features, weight, rows = shape.samples, shape.features, weight_bytes(shape), shape.classes
    middling_weight = weight <= (32 if samples >= 64 and rows >= 512 else 16) * _MB
    if hidden and rows * classes >= 20_000 and middling_weight:  # a large last layer behind no large first one
        # of an odd length, rows of either layer are read number by number
        odd = samples == 1 and rows >= 512 and features >= 96 and (features % 2 != 0 or rows % 2 != 0)
        batch = samples >= 64 and weight <= _MB and (rows >= 96 or classes > 4096)
        if classes > 8192 or (rows >= 512 and samples * rows >= 8192) or batch or odd:
            return True
    if not config.reads or shape.dtype == "float32":
        return config.reads and _pays_in_float32(shape, norms)
    # rows of an odd length are read number by number
    many_odd = features % 2 != 0 and samples >= 48 and classes > 4096 and features >= 256
    if hidden or norms:  # programs wait for a norm's statistics, too
        most = 100 if samples < 96 or classes <= 4096 else 640 if classes % 2 == 0 else 384 if classes > 8192 else 100
        few_features = samples >= 16 and classes > 2048 and features <= most
        middling = 512 < classes <= 8192 and features > 1024 and samples >= (24 if features <= 8192 else 128)
        return not hidden and (few_features or middling or many_odd or (features >= 1 << 14 and classes > 4096))
    long_rows = samples >= 16 and features >= (1 << 15 if weight < 128 * _MB else 1 << 14)
    odd_bytes = features % 2 != 0 and rows > 16 and (weight >= 64 * _MB if samples == 1 else long_rows)
    few_features = features <= (192 if samples < 96 or classes <= 8192 or (classes % 2 and features % 8 == 0) else 512)
    # logits of a number of classes that 4 does not divide a library writes slowly
    large_weight = classes > 64 and classes % 4 == 0 and weight >= (32 if samples <= 128 else 8) * _MB
    many_classes = samples > 32 and classes > 4096 and few_features
    return many_odd or odd_bytes or many_classes or (samples >= 96 and large_weight)


def _pays_in_float32(shape: HeadShape, norms: bool) -> bool:
    """Return whether a library is sooner done with float32, which tensor cores multiply in three products."""
    samples, features, weight, rows = shape.samples, shape.features, weight_bytes(shape), shape.classes
    if features % 2 != 0 and not 1 < samples < 24 and rows > 64 and weight >= 8 * _MB:  # read number by number
        return True
    if samples == 1:  # whose norm a library computes in one block of threads
        return not norms and (features >= 1 << 15 or (features >= 1 << 10 and weight >= 4 * _MB))
    if rows > 8192:
        return (samples > 32 and features <= 256) or (samples >= 128 and features >= 2048)
    return samples > 32 and rows > 4096 and weight >= 64 * _MB  # tiles of ours leave SMs idle
