"""A convolution with what follows it, by PyTorch's operations."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

#: What may follow, by name, each as PyTorch defines it; "" is nothing.
FOLLOWING: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda y: y, "relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish, "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}  # fmt: skip


def number_of_following(name: str) -> int:
    """Return the position of a name in ``FOLLOWING``."""
    return list(FOLLOWING).index(name)


def convolution_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sequence[Sequence[int]],
    groups: int = 1,
    following: str = "",
    addend: Tensor | None = None,
) -> Tensor:
    """Convolve x [N, C, H, W] by ``weight`` [O, C / groups, h, w]; ``sizes`` are stride, padding and dilation.

    A depthwise weight of float32 multiplies x of half precision in float32, and what it makes is rounded.
    """
    stride, padding, dilation = map(list, sizes)
    mixed = weight.dtype == torch.float32 and x.dtype in (torch.float16, torch.bfloat16) and groups == len(weight)
    y = F.conv2d(x.float() if mixed else x, weight, bias, stride, padding, dilation, groups)
    y = y.to(x.dtype) if mixed else y
    return FOLLOWING[following](y if addend is None else y + addend)
