"""The rule of heads whose logits a library computes sooner than programs of ours, which then only decide.

Found by 1,359 random heads of both ways (H100, in no record). ``auxhead-tune heads --random`` measures the way not
taken, too; autotune/records/h100/random-heads.jsonl is of others.
"""

from .head_shape import HeadShape
from .launch_config import LaunchConfig, by_library
from .launch_rule import weight_bytes
from .pooling_rule import packing

_MB = 1 << 20


def config_of_library(shape: HeadShape, classes: int) -> LaunchConfig:
    """Configure a library's product; a launch of its own packs the features of ``shape`` before, if they are pooled."""
    return by_library(classes) if shape.view.in_order else packing(shape, by_library(classes))


def library_pays(shape: HeadShape, config: LaunchConfig, classes: int, *, hidden: bool, norms: bool) -> bool:
    """Return whether PyTorch's operations are to multiply; ``config`` is what programs would do.

    It and ``shape`` are of the layer that reads the features, ``classes`` is K; the head has a hidden layer, a norm.
    """
    samples, features, weight, rows = shape.samples, shape.features, weight_bytes(shape), shape.classes
    is_float32 = shape.dtype == "float32"
    if hidden and rows * classes >= 1 << 16 and weight <= 16 * _MB:  # a large last layer behind no large first one
        if classes > 12_288 or (samples >= 8 and rows >= 512):
            return True
    if not config.reads:
        return False
    if features % (4 if is_float32 else 2) != 0:  # rows are read number by number
        many = rows >= 100 and samples >= (24 if is_float32 else 16) and (hidden or not norms)
        if many or (samples == 1 and weight >= 2 * _MB):
            return True
    if is_float32 and samples == 1:
        return features >= 1 << 15 or (features >= 1 << 11 and weight >= 4 * _MB)
    if hidden:
        return False
    if norms:  # programs wait for its statistics, too
        return features <= 1024 and not is_float32 and weight <= 16 * _MB and classes > 2048
    if is_float32:
        return samples > 64 and classes >= 1000
    if samples < 128:
        return False
    return features <= 512 if classes > 4096 else classes > 64 and features >= 1 << 18
