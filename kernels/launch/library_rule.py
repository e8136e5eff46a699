"""The rule of heads whose logits a library computes sooner than programs of ours, which then only decide.

Found by 1,359 random heads of both ways (H100), the 240 of autotune/records/h100/random-heads.jsonl among them; the
others are in no record. ``auxhead-tune heads --random`` measures the way not taken, too.
"""

import math

from .head_shape import HeadShape
from .launch_config import LaunchConfig
from .launch_rule import weight_bytes

_MB = 1 << 20
#: Elements of a last layer behind a hidden one from which on a library multiplies both, unless the first is large.
_LIBRARY_LAST_LAYER = 1 << 16


def library_pays(shape: HeadShape, config: LaunchConfig, classes: int, *, hidden: bool, norms: bool) -> bool:
    """Return whether PyTorch's operations are to multiply; ``config`` is what programs would do.

    It and ``shape`` are of the layer that reads the features, ``classes`` is K; the head has a hidden layer, a norm.
    """
    samples, features, weight, rows = shape.samples, shape.features, weight_bytes(shape), shape.classes
    unpooled, turned, is_float32 = shape.view.unpooled, shape.view.turned, shape.dtype == "float32"
    # channels of one window each are packed by few programs, which read as many elements at a time as rows allow
    large_windows = shape.layout == "contiguous" and shape.view.positions == 1 and shape.view.window_w > 64
    if hidden and rows * classes >= _LIBRARY_LAST_LAYER and weight <= 8 * _MB:
        if classes > 4096 or (samples >= 8 and rows >= 512):
            return True
    elif large_windows and not (is_float32 or norms):
        return samples >= 32 and classes > 2048 and weight <= 16 * _MB
    if not config.reads:
        return False
    if features % (4 if is_float32 else 2) != 0:  # rows are read number by number
        many = rows >= 100 and samples >= (24 if is_float32 else 16) and (hidden or not norms)
        if many or (samples == 1 and weight >= 2 * _MB):
            return True
    if hidden:
        return False
    map_bytes = math.prod(shape[:4]) * shape.element_size
    if norms:  # programs wait for its statistics, too
        small = weight <= 8 * _MB and (classes > 2048 or not unpooled)
        large_map = large_windows and map_bytes > 4 * weight
        return features <= 2048 and not is_float32 and (large_map or small)
    if is_float32 and turned:
        return samples <= 2
    if is_float32:
        if unpooled:
            return (samples > 64 and classes >= 1000) or (samples == 1 and features >= 1 << 16)
        return large_windows and map_bytes > max(8 * weight, 64 * _MB)
    if turned:
        return features % 8 != 0 and samples >= 32 and classes > 64
    if not unpooled or samples < 128:
        return False
    return features <= 192 if classes > 4096 else classes > 64 and weight >= 16 * _MB
