"""``FusedLinear``: a linear layer of tokens with its activation, in one launch of Triton where that is no slower."""

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels import FOLLOWING, fused_conv2d, takes_convolution
from ...kernels.convolution import compiled_for, fused_conv2d_operator
from .timed_convolutions import prefers_triton

#: Modes of whoever traces operators, as make_fx, or computes shapes alone.
_TRACING = (
    torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL
)  # fmt: skip
#: As a convolution: stride, padding and dilation.
_SIZES = (1, 1), (0, 0), (1, 1)


class FusedLinear(nn.Module):
    """``linear -> activation``, which shares the parameters of the linear layer that it stands for.

    Triton's convolution by windows of one multiplies maps of one column: as many positions as there are vectors.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, following: str = "") -> None:
        """Multiply by ``weight``, [O, C], and add ``bias``; ``following`` is a name of ``FOLLOWING``."""
        super().__init__()
        assert are_parameters(weight, bias)
        self.weight, self.bias = weight, bias
        self.following = following
        """The activation behind it."""
        self.in_triton = False
        """True if it runs as one launch of Triton."""
        self.compiled = False
        """True if a compiler gets it, which knows no launch of ours."""

    @torch.no_grad()
    def choose(self, x: Tensor) -> None:
        """Use Triton if it takes this input, agrees with the plain layer and is no slower than that."""
        self.in_triton = False
        found = self.in_triton_by(x)
        if found is not None:
            kind = x.shape, self.weight.shape, self.weight.stride(), self.bias is None
            others, count = partial(self.forward, x), x.numel() * len(self.weight)
            self.in_triton = prefers_triton(*found, _as_map(others()), others, kind, count)

    def in_triton_by(self, x: Tensor) -> tuple[Hashable, Callable[[], Tensor]] | None:
        """Return what Triton compiles for this input, and its product; None where it does not take it."""
        if not self._takes(x):
            return None
        given = _as_map(x), self._windows(), self.bias, _SIZES, 1, self.following
        key = compiled_for(*given), self.compiled
        return key, partial(fused_conv2d, *given, begins_early=self.compiled)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., C] to [..., O], and apply the activation."""
        if not (self.in_triton and self._takes(x)):
            return FOLLOWING[self.following](F.linear(x, self.weight, self.bias))
        if self.compiled:
            sizes = map(list, _SIZES)
            y = fused_conv2d_operator(_as_map(x), self._windows(), self.bias, *sizes, 1, self.following, None, True)
        else:
            y = fused_conv2d(_as_map(x), self._windows(), self.bias, _SIZES, 1, self.following)
        return y.permute(0, 2, 3, 1).view(*x.shape[:-1], len(self.weight))

    def _takes(self, x: Tensor) -> bool:
        """Return whether Triton takes x; not from who traces this, to whom a launch of these sizes says too little.

        A compiler of ours and an export are given the operator.
        """
        if torch.compiler.is_dynamo_compiling() or torch.jit.is_tracing() or x.is_nested:
            return False
        if not (self.compiled or torch.compiler.is_exporting()) and any(map(torch._C._get_dispatch_mode, _TRACING)):
            return False
        if x.layout is not torch.strided or not all(type(size) is int for size in x.shape):
            return False
        fits = x.ndim > 0 and x.is_contiguous() and x.numel() > 0 and x.shape[-1] == self.weight.shape[1]
        return fits and takes_convolution(_as_map(x), self._windows(), self.bias, _SIZES)

    def _windows(self) -> Tensor:
        return self.weight[:, :, None, None]

    def extra_repr(self) -> str:
        """Show what is in it."""
        return f"{'triton' if self.in_triton else 'plain'}, following={self.following!r}"


def are_parameters(weight: Any, bias: Any) -> bool:
    """Return whether weight and bias are plain parameters: neither computed at each call, nor of a kind of their own.

    Buffers a module would not know for what they are if they were attributes of another one.
    """
    plain = type(weight) is nn.Parameter and weight.layout is torch.strided
    return plain and (bias is None or type(bias) is nn.Parameter)


def _as_map(x: Tensor) -> Tensor:
    """Return dense vectors [..., C] as a map of one column in channels_last, [1, C, number of vectors, 1]."""
    return x.view(1, math.prod(x.shape[:-1]), 1, x.shape[-1]).permute(0, 3, 1, 2)
