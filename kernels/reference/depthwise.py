"""A depthwise convolution with what follows it, by PyTorch's operations."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

#: What may follow, by name, each as PyTorch defines it; "" is nothing.
FOLLOWING: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y, "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish,
}  # fmt: skip


def number_of_following(name: str) -> int:
    """Return the position of a name in ``FOLLOWING``."""
    return list(FOLLOWING).index(name)


def depthwise_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[Sequence[int]], following: str
) -> Tensor:
    """Convolve each channel of x [N, C, H, W] by its window; ``sizes`` are stride, padding and dilation."""
    stride, padding, dilation = map(list, sizes)
    return FOLLOWING[following](F.conv2d(x, weight, bias, stride, padding, dilation, len(weight)))
