"""max_pool2d: max-pooling by a Triton kernel for channels_last maps, by PyTorch for all others."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused_head import runs_triton, wants_plain_pytorch
from .launch.launch_config import next_power_of_2

try:
    from .jit import max_pool as kernel
except ImportError:  # no Triton for this platform
    kernel = None  # type: ignore[assignment]

#: The kernel writes out the reads of a window one by one; larger windows are rare and no longer bound by memory.
LARGEST_WINDOW = 49
#: Positions of the input or the output, at most: they and programs are counted in int32.
MOST_POSITIONS = 2**31 - 2**11
#: Outputs of a program: 8 for each of 128 threads, so that a thread reads 16 bytes of float16 at a time.
BLOCK_ELEMENTS = 1024
#: Channels of a program, at most: 128 bytes of float16 are a cache line.
MOST_CHANNELS = 64


def max_pool2d(
    x: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
) -> Tensor:
    """Pool as ``torch.nn.functional.max_pool2d`` does, bit for bit, with its arguments, result and errors.

    The Triton kernel runs where :func:`runs_triton` says so, if x, [N, C, H, W], is a dense channels_last map of
    float32, float16 or bfloat16 and a window has at most 49 elements; the result is channels_last, too. All else goes
    to PyTorch, as does an x whose gradient is wanted, and all within the transforms of ``torch.func``.
    """
    kernel_pair = _pair(kernel_size)
    stride_pair = kernel_pair if stride is None else _pair(stride)
    padding_pair = _pair(padding)
    if not _takes(x, kernel_pair, stride_pair, padding_pair):
        return F.max_pool2d(x, kernel_size, stride, padding)
    (samples, channels, height, width), pairs = x.shape, (padding_pair, kernel_pair, stride_pair)
    out_h, out_w = (
        (size + 2 * pad - window) // step + 1 for size, pad, window, step in zip((height, width), *pairs, strict=True)
    )
    if min(out_h, out_w) < 1 or samples * max(height * width, out_h * out_w) > MOST_POSITIONS:
        return F.max_pool2d(x, kernel_size, stride, padding)
    if torch.compiler.is_exporting():
        return _max_pool_operator(x, [*kernel_pair], [*stride_pair], [*padding_pair])
    shape, memory_format = (samples, channels, out_h, out_w), torch.channels_last
    out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    positions = samples * out_h * out_w
    block_c = min(next_power_of_2(channels), MOST_CHANNELS)
    block_p = BLOCK_ELEMENTS // block_c
    programs = -(-positions // block_p) * -(-channels // block_c)
    with torch.cuda.device_of(x):
        kernel.max_pool_kernel[(programs,)](
            x, out, positions, channels, height, width, out_h, out_w, *kernel_pair, *stride_pair, *padding_pair,
            BLOCK_P=block_p, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return out


@torch.library.custom_op("auxhead::max_pool2d", mutates_args=())
def _max_pool_operator(x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int]) -> Tensor:
    """Pool as :func:`max_pool2d`: what an exported program calls, as a launch cannot be traced."""
    return max_pool2d(x, (kernel_size[0], kernel_size[1]), (stride[0], stride[1]), (padding[0], padding[1]))


@_max_pool_operator.register_fake
def _(x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int]) -> Tensor:
    return F.max_pool2d(x, kernel_size, stride, padding)


def _takes(x: Tensor, kernel_size: tuple[int, ...], stride: tuple[int, ...], padding: tuple[int, ...]) -> bool:
    """Return whether the kernel can pool this; arguments that PyTorch refuses are left to PyTorch."""
    return (
        runs_triton(x)
        and not wants_plain_pytorch()
        and x.ndim == 4
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and not (x.requires_grad and torch.is_grad_enabled())
        and not x.is_neg()  # whose memory holds the numbers with the other sign
        and len(kernel_size) == len(stride) == len(padding) == 2
        and min(kernel_size) > 0
        and kernel_size[0] * kernel_size[1] <= LARGEST_WINDOW
        and min(stride) > 0
        and all(0 <= pad <= window // 2 for pad, window in zip(padding, kernel_size, strict=True))
    )


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return (v, v) for a number; a sequence, of whatever length, as it is."""
    return (value, value) if isinstance(value, int) else tuple(value)
