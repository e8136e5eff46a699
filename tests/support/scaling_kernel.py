"""A Triton kernel as users write them in layers: it reads a tensor that no operator of PyTorch is given."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _scale(x, scale, y, count, BLOCK: tl.constexpr):
    off = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + off, mask=off < count) * tl.load(scale)
    tl.store(y + off, value, mask=off < count)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Return a dense tensor multiplied by the one element of another."""
    y = torch.empty_like(x)
    _scale[(triton.cdiv(x.numel(), 1024),)](x, scale, y, x.numel(), BLOCK=1024)
    return y
