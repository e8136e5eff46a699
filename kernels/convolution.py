"""fused_conv2d: a convolution with its bias, a sum and activation by a Triton kernel, where it takes them."""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .early_start import early_start
from .fused_head import runs_triton, wants_plain_pytorch
from .launch.launch_config import next_power_of_2
from .max_pool import LARGEST_WINDOW, MOST_POSITIONS
from .reference.convolution import FOLLOWING, convolution_reference, number_of_following

try:
    from .jit import convolution as kernel
except ImportError:  # no Triton for this platform
    kernel = None  # type: ignore[assignment]

__all__ = [
    "FOLLOWING",
    "compiled_for",
    "fused_conv2d",
    "fused_conv2d_operator",
    "products",
    "takes_convolution",
]

#: Channels of a depthwise program, at most, and numbers of a row of its strips: four a thread. Of 64 channels or with
#: eight numbers a thread programs take 4 to 7 % longer, each with its best rows (H200).
_MOST_CHANNELS, _ROW_NUMBERS = 32, 512
#: Rows of a depthwise strip: the first of which there are so many programs, else one; more rows of input than so many
#: take too many registers. It is 1 % from each one's best in the mean of 77 convolutions of four networks (H200).
_ROWS, _LEAST_PROGRAMS, _MOST_ROWS_READ = (7, 4, 2), 300, 13
_WARPS = 4
#: Channels of other ones have to be a multiple of this, which a load takes.
_VECTOR = 8


class _Block(NamedTuple):
    """What a program of other convolutions takes, and microseconds on an H200 that predict how long a launch takes."""

    positions: int
    outputs: int  # channels
    inputs: int  # channels of a slice, in a step
    slices: int
    stages: int
    launch: float
    step: float  # of a program
    more: float  # for each multiprocessor's further program
    more_step: float  # for each of its steps

    def us(self, positions: int, outputs: int, inputs: int, window: int) -> float:
        """Predict microseconds: of 591 convolutions of nine networks within 5 to 9 % in the median, by block (H200)."""
        steps = window * -(-inputs // (self.inputs * self.slices))
        further = max(0.0, -(-positions // self.positions) * -(-outputs // self.outputs) / _MULTIPROCESSORS - 1.0)
        return self.launch + self.step * steps + further * (self.more + self.more_step * steps)


_MULTIPROCESSORS = 132
#: Of 42 blocks those with which these convolutions take 1.5 % longer, all together, than each with its best.
_BLOCKS = (
    _Block(16, 16, 32, 4, 4, 2.48, 0.169, 0.673, 0.121),
    _Block(16, 16, 64, 4, 3, 2.42, 0.276, 0.619, 0.158),
    _Block(16, 32, 128, 1, 3, 1.95, 0.306, 0.253, 0.134),
    _Block(64, 32, 32, 1, 5, 1.95, 0.103, 0.376, 0.077),
    _Block(64, 32, 64, 1, 4, 2.00, 0.187, 0.492, 0.116),
    _Block(128, 64, 64, 1, 3, 2.57, 0.301, 0.865, 0.312),
)


def products(x: Tensor, weight: Tensor, sizes: Sequence[Sequence[int]]) -> int:
    """Return how many numbers a convolution multiplies."""
    return weight.numel() * len(x) * math.prod(out_size(x.shape[2:], weight.shape[2:], sizes))


def takes_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sequence[Sequence[int]],
    groups: int = 1,
    addend: Tensor | None = None,
    out: Tensor | None = None,
) -> bool:
    """Return whether a kernel convolves x, of the arguments of :func:`fused_conv2d`.

    Depthwise ones without an addend, also of a weight and bias of float32; others of half precision and channels that
    are multiples of 8, whose weight lies in channels_last. Maps lie in channels_last, x and ``out`` maybe in wider
    rows, and int32 counts their numbers, those of the padding included.
    """
    tensors = [each for each in (x, weight, bias, addend, out) if each is not None]
    factors = torch.float32 if _is_depthwise(weight, groups) and weight.dtype == torch.float32 else x.dtype
    return (
        runs_triton(x)
        and not wants_plain_pytorch()
        and not torch.is_autocast_enabled(x.device.type)
        and all(each.dtype == (factors if each is weight or each is bias else x.dtype) for each in tensors)
        and all(each.device == x.device and not each.is_neg() for each in tensors)
        and x.ndim == weight.ndim == 4
        and min(x.numel(), weight.numel()) > 0
        and weight.numel() < MOST_POSITIONS
        and x.shape[1] == groups * weight.shape[1]
        and _is_in_rows(x)
        and (bias is None or bias.shape == (len(weight),) and bias.is_contiguous())
        and not (torch.is_grad_enabled() and any(each.requires_grad for each in tensors))
        and all(len(size) == 2 for size in sizes)
        and min(sizes[1]) >= 0
        and _reach(x, sizes[1]) < MOST_POSITIONS
        and min(size := out_size(x.shape[2:], weight.shape[2:], sizes)) > 0
        and math.prod(out_shape := (len(x), len(weight), *size)) < MOST_POSITIONS
        and (out is None or out.shape == out_shape and _is_in_rows(out))
        and (
            _takes_depthwise(x, weight, addend)
            if _is_depthwise(weight, groups)
            else groups == 1 and _takes_dense(x, weight, out_shape, addend, out)
        )
    )


def _is_in_rows(x: Tensor) -> bool:
    """Return whether a map lies in channels_last, or in the first or other channels of one that does."""
    if x.is_contiguous(memory_format=torch.channels_last):
        return True
    (_, channels, height, width), row = x.shape, _row(x)
    in_rows = row >= channels and x.stride() == (height * width * row, 1, width * row, row)
    return in_rows and len(x) * height * width * row < MOST_POSITIONS


def _reach(x: Tensor, padding: Sequence[int]) -> int:
    """Return how many numbers windows reach over, which are counted in int32: those of a map and of its padding."""
    return ((len(x) * x.shape[2] + padding[0] + 1) * x.shape[3] + padding[1]) * _row(x)


def _row(x: Tensor) -> int:
    """Return how many numbers of a map in rows lie from one position to the next."""
    return x.shape[1] if x.is_contiguous(memory_format=torch.channels_last) else x.stride(3)


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return weight.ndim == 4 and groups == len(weight) and weight.shape[1] == 1


def _takes_depthwise(x: Tensor, weight: Tensor, addend: Tensor | None) -> bool:
    return (
        addend is None
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and weight[0, 0].numel() <= LARGEST_WINDOW
    )


def _takes_dense(
    x: Tensor, weight: Tensor, out_shape: tuple[int, ...], addend: Tensor | None, out: Tensor | None
) -> bool:
    rows = _row(x), 0 if out is None else _row(out)
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and all(size % _VECTOR == 0 for size in (*weight.shape[:2], *rows))
        and weight.is_contiguous(memory_format=torch.channels_last)
        and (addend is None or addend.shape == out_shape and addend.is_contiguous(memory_format=torch.channels_last))
    )


def fused_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sequence[Sequence[int]],
    groups: int = 1,
    following: str = "",
    addend: Tensor | None = None,
    out: Tensor | None = None,
    begins_early: bool = False,
) -> Tensor:
    """Convolve x, [N, C, H, W], by ``weight``, [O, C / groups, h, w]; add bias and ``addend``; all in one launch.

    ``sizes`` are stride, padding and dilation, pairs as ``F.conv2d`` takes them; ``following`` is a name of
    ``FOLLOWING``. Sums are in float32 and rounded once. A depthwise weight is read in the order h, w, C, and one that
    lies otherwise is copied; of float32 it and its bias may go with x of half precision. What
    :func:`takes_convolution` does not take is PyTorch's. The result is written to ``out``, which is returned, if it is
    given: of the result's shape, dtype and device, and no part of what is read. It ``begins_early`` as
    :func:`early_start` has it.

    Raises:
        ValueError: a name that ``FOLLOWING`` has not, or an ``out`` of another shape, dtype or device.
        RuntimeError: what PyTorch's convolution refuses.
    """
    if following not in FOLLOWING:
        raise ValueError(f"following: got {following!r}, wants one of {list(FOLLOWING)}")
    if not takes_convolution(x, weight, bias, sizes, groups, addend, out):
        y = convolution_reference(x, weight, bias, sizes, groups, following, addend)
        return y if out is None else _copied_to(out, y)
    if torch.compiler.is_exporting():  # a launch cannot be traced
        y = fused_conv2d_operator(x, weight, bias, *map(list, sizes), groups, following, addend, begins_early)
        return y if out is None else _copied_to(out, y)
    (samples, channels, height, width), (out_h, out_w) = x.shape, out_size(x.shape[2:], weight.shape[2:], sizes)
    outputs = len(weight)
    if out is None:
        shape, memory_format = (samples, outputs, out_h, out_w), torch.channels_last
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    (stride, padding, dilation), window = sizes, weight.shape[2:]
    how = (_row(x), _row(out), height, width, out_h, out_w, *window, *stride, *padding, *dilation)
    constants = _constants(x, weight, sizes, groups, following, _row(out))
    with torch.cuda.device_of(x):
        if _is_depthwise(weight, groups):
            strips = _strips(samples, (out_h, out_w), constants["ROWS"])
            blocks = -(-strips // constants["BLOCK_P"])
            kernel.depthwise_kernel[(blocks * -(-channels // constants["BLOCK_C"]),)](
                x, weight.permute(2, 3, 1, 0).contiguous(), bias, out, strips, channels, *how, **constants,
                num_warps=_WARPS, **early_start(x, begins_early),
            )  # fmt: skip
        else:
            positions = samples * out_h * out_w
            blocks = -(-positions // constants["BLOCK_P"])
            kernel.convolution_kernel[(blocks * -(-outputs // constants["BLOCK_O"]),)](
                x, weight, bias, addend, out, positions, channels, outputs, *how, **constants, num_warps=_WARPS,
                **early_start(x, begins_early),
            )  # fmt: skip
    return out


def _copied_to(out: Tensor, y: Tensor) -> Tensor:
    if (out.shape, out.dtype, out.device) != (y.shape, y.dtype, y.device):
        got, wants = (f"{each.dtype} of shape {list(each.shape)} on {each.device}" for each in (out, y))
        raise ValueError(f"out: got {got}, wants {wants}, as the result has")
    return out.copy_(y)


def compiled_for(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    sizes: Sequence[Sequence[int]],
    groups: int = 1,
    following: str = "",
    addend: Tensor | None = None,
) -> Hashable:
    """Return all that a launch of :func:`fused_conv2d`, which takes these arguments, is compiled for on a device."""
    stride, _, dilation = sizes
    lines = (*weight.shape[2:], stride[0], dilation[0]) if _is_depthwise(weight, groups) else None
    constants = _constants(x, weight, sizes, groups, following)
    return x.dtype, weight.dtype, lines, bias is None, addend is None, *constants.items()


def _constants(
    x: Tensor, weight: Tensor, sizes: Sequence[Sequence[int]], groups: int, following: str, row_out: int = 0
) -> dict[str, Any]:
    number, channels, out = number_of_following(following), x.shape[1], out_size(x.shape[2:], weight.shape[2:], sizes)
    if _is_depthwise(weight, groups):
        block_c = min(next_power_of_2(channels), _MOST_CHANNELS)
        block_p, vector = _ROW_NUMBERS // block_c, math.gcd(channels, _row(x), row_out, 16)

        def suits(rows: int) -> bool:
            if -(-_strips(len(x), out, rows) // block_p) * -(-channels // block_c) < _LEAST_PROGRAMS:
                return False
            read = {row * sizes[0][0] + down * sizes[2][0] for row in range(rows) for down in range(weight.shape[2])}
            return len(read) <= _MOST_ROWS_READ

        return {
            "FOLLOWING": number, "VECTOR": vector, "ROWS": next(filter(suits, _ROWS), 1), "BLOCK_P": block_p,
            "BLOCK_C": block_c,
        }  # fmt: skip
    window = weight.shape[2:]
    positions = len(x) * math.prod(out)
    block = min(_BLOCKS, key=lambda each: each.us(positions, len(weight), channels, math.prod(window)))
    return {
        "FOLLOWING": number, "VECTOR": _VECTOR, "IS_PRODUCT": [*x.shape[2:]] == out and {*window, *sizes[0]} == {1},
        "STAGES": block.stages, "BLOCK_P": block.positions, "BLOCK_O": block.outputs, "BLOCK_C": block.inputs,
        "SLICES": block.slices,
    }  # fmt: skip


def _strips(samples: int, out: Sequence[int], rows: int) -> int:
    return samples * -(-out[0] // rows) * out[1]


def out_size(size: Sequence[int], window: Sequence[int], sizes: Sequence[Sequence[int]]) -> list[int]:
    """Return height and width of what a convolution makes of a map of that ``size``."""
    of_both = zip(size, window, *sizes, strict=True)
    return [(size + 2 * pad - gap * (window - 1) - 1) // step + 1 for size, window, step, pad, gap in of_both]


@torch.library.custom_op("auxhead::fused_conv2d", mutates_args=())
def fused_conv2d_operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, following: str, addend: Tensor | None, begins_early: bool,
) -> Tensor:  # fmt: skip
    """Convolve as :func:`fused_conv2d`: what a compiler is given, whose output lies in one way whoever made it."""
    sizes = stride, padding, dilation
    y = fused_conv2d(x, weight, bias, sizes, groups, following, addend, begins_early=begins_early)
    return y.contiguous(memory_format=torch.channels_last)


@fused_conv2d_operator.register_fake
def _(x, weight, bias, stride, padding, dilation, groups, following, addend, begins_early):  # type: ignore[no-untyped-def]
    y = convolution_reference(x, weight, bias, (stride, padding, dilation), groups, "", addend)
    return torch.empty_like(y, memory_format=torch.channels_last)
