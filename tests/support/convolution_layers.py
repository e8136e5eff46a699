"""Layers that convolve, and maps in wider rows, for tests of ``fused_conv2d``."""

import torch
from auxhead.kernels.reference.convolution import convolution_reference

LAST = torch.channels_last
#: N, C, H, W, window, stride, padding, dilation, with a bias
CASES = [
    (2, 32, 14, 14, (3, 3), (1, 1), (1, 1), (1, 1), True),
    (1, 72, 9, 9, (5, 5), (2, 2), (2, 2), (1, 1), True),  # several blocks of channels
    (3, 5, 11, 7, (3, 3), (2, 1), (0, 1), (1, 1), False),
    (1, 96, 8, 8, (7, 7), (1, 1), (3, 3), (1, 1), True),  # ConvNeXt's
    (2, 3, 12, 9, (3, 2), (1, 2), (2, 0), (2, 3), True),
    (1, 65, 1, 1, (3, 3), (1, 1), (1, 1), (1, 1), True),
    (1, 1, 6, 8, (1, 3), (1, 1), (0, 4), (1, 1), False),  # windows wholly outside
]
#: The same, and then as many outputs, and True with an addend.
DENSE_CASES = [
    (2, 32, 14, 14, (3, 3), (1, 1), (1, 1), (1, 1), True, 48, False),
    (1, 72, 9, 9, (5, 5), (2, 2), (2, 2), (1, 1), True, 16, True),
    (3, 8, 11, 7, (3, 3), (2, 1), (0, 1), (1, 1), False, 136, True),
    (1, 264, 7, 7, (1, 1), (1, 1), (0, 0), (1, 1), True, 24, True),  # a product
    (2, 520, 5, 6, (1, 1), (1, 1), (0, 0), (1, 1), False, 8, False),
    (1, 64, 8, 8, (1, 1), (2, 2), (0, 0), (1, 1), True, 64, False),
    (1, 16, 6, 6, (1, 1), (1, 1), (1, 1), (1, 1), True, 16, False),  # padded
    (2, 40, 12, 9, (3, 2), (1, 2), (2, 0), (2, 3), True, 72, True),
    (1, 8, 1, 1, (3, 3), (1, 1), (1, 1), (1, 1), False, 8, False),
    (1, 8, 6, 8, (1, 3), (1, 1), (0, 4), (1, 1), False, 8, True),
]


def layer(case, dtype, device):
    """Return what ``fused_conv2d`` takes: a map, a weight, a bias or None, sizes and groups; and an addend or None."""
    *shape, window, stride, padding, dilation, biased = case[:9]
    outputs, groups = (shape[1], shape[1]) if len(case) == 9 else (case[9], 1)
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=LAST)
    weight = torch.randn(outputs, shape[1] // groups, *window, device=device).to(dtype)
    weight = weight if groups > 1 else weight.contiguous(memory_format=LAST)
    bias, sizes = torch.randn(outputs, device=device).to(dtype) if biased else None, (stride, padding, dilation)
    given = x, weight, bias, sizes, groups
    return given, torch.randn_like(convolution_reference(*given)) if len(case) > 9 and case[10] else None


def in_rows(x: torch.Tensor, first: int, channels: int) -> torch.Tensor:
    """Return a map as some of the channels of a wider one, whose others are NaN."""
    wide = torch.full((len(x), channels, *x.shape[2:]), torch.nan, dtype=x.dtype, device=x.device)
    wide = wide.contiguous(memory_format=LAST)
    return wide[:, first : first + x.shape[1]].copy_(x)
