"""depthwise_conv2d: a depthwise convolution, its bias and activation by a Triton kernel, where it takes them."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused_head import runs_triton, wants_plain_pytorch
from .launch.launch_config import next_power_of_2
from .max_pool import BLOCK_ELEMENTS, LARGEST_WINDOW, MOST_POSITIONS
from .reference.depthwise import FOLLOWING, depthwise_reference, number_of_following

try:
    from .jit import depthwise as kernel
except ImportError:  # no Triton for this platform
    kernel = None  # type: ignore[assignment]

__all__ = ["FOLLOWING", "depthwise_conv2d", "depthwise_operator", "takes_depthwise"]

#: Channels of a program, at most. Of 128 or of 8 positions programs take two to three times as long (H200).
_MOST_CHANNELS = 32
#: Products of a number and a factor, at most. A map of 14 x 14 takes 2 to 4 us for cuDNN's 6 to 12; with more than
#: these cuDNN's kernels, which keep numbers for the next window, are faster (H200).
MOST_PRODUCTS = 30_000_000


def takes_depthwise(x: Tensor, weight: Tensor, sizes: Sequence[Sequence[int]]) -> bool:
    """Return whether the kernel convolves x; ``sizes`` are stride, padding and dilation."""
    return (
        runs_triton(x)
        and not wants_plain_pytorch()
        and x.ndim == 4
        and 0 < x.numel() < MOST_POSITIONS
        and x.is_contiguous(memory_format=torch.channels_last)
        and x.shape[1] == weight.shape[0]
        and weight.shape[1] == 1
        and x.dtype == weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight[0, 0].numel() <= LARGEST_WINDOW
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not (x.is_neg() or weight.is_neg())  # whose memory holds the numbers with the other sign
        and all(len(size) == 2 for size in sizes)
        and min(out := _out_shape(x, weight, sizes)) > 0
        and weight.numel() * len(x) * math.prod(out) <= MOST_PRODUCTS
    )


def depthwise_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[Sequence[int]], following: str = ""
) -> Tensor:
    """Convolve each channel of x, [N, C, H, W], by its window of ``weight``, [C, 1, h, w], in one launch.

    The weight is read in the order h, w, C; one that lies otherwise is copied. ``sizes`` are stride, padding and
    dilation, pairs as ``F.conv2d`` takes them; ``following`` is a name of ``FOLLOWING``. Sums are in float32 and
    rounded once. What :func:`takes_depthwise` does not take is PyTorch's.
    """
    if not takes_depthwise(x, weight, sizes):
        return depthwise_reference(x, weight, bias, sizes, following)
    if torch.compiler.is_exporting():  # a launch cannot be traced
        return depthwise_operator(x, weight, bias, *map(list, sizes), following)
    (samples, channels, height, width), (out_h, out_w) = x.shape, _out_shape(x, weight, sizes)
    shape, memory_format = (samples, channels, out_h, out_w), torch.channels_last
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    positions, block_c = samples * out_h * out_w, min(next_power_of_2(channels), _MOST_CHANNELS)
    block_p = BLOCK_ELEMENTS // block_c
    programs = -(-positions // block_p) * -(-channels // block_c)
    (stride, padding, dilation), window = sizes, weight.shape[2:]
    with torch.cuda.device_of(x):
        kernel.depthwise_kernel[(programs,)](
            x, weight.permute(2, 3, 1, 0).contiguous(), bias, out, positions, channels, height, width, out_h, out_w,
            *window, *stride, *padding, *dilation,
            FOLLOWING=number_of_following(following), VECTOR=math.gcd(channels, 16), BLOCK_P=block_p, BLOCK_C=block_c,
            num_warps=4,
        )  # fmt: skip
    return out


def _out_shape(x: Tensor, weight: Tensor, sizes: Sequence[Sequence[int]]) -> list[int]:
    of_both = zip(x.shape[2:], weight.shape[2:], *sizes, strict=True)
    return [(size + 2 * pad - gap * (window - 1) - 1) // step + 1 for size, window, step, pad, gap in of_both]


@torch.library.custom_op("auxhead::depthwise_conv2d", mutates_args=())
def depthwise_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    following: str,
) -> Tensor:  # fmt: skip
    """Convolve as :func:`depthwise_conv2d`: what a compiler is given, whose output lies in one way whoever made it."""
    y = depthwise_conv2d(x, weight, bias, (stride, padding, dilation), following)
    return y.contiguous(memory_format=torch.channels_last)


@depthwise_operator.register_fake
def _(x, weight, bias, stride, padding, dilation, following):  # type: ignore[no-untyped-def]
    return torch.empty_like(
        F.conv2d(x, weight, bias, stride, padding, dilation, len(weight)), memory_format=torch.channels_last
    )
