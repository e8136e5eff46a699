"""Errors by rounding: how far outputs are from a float64 truth, and how far they may be."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .kept import shallow_copy

#: Error that whatever stands in for a model may have, in multiples of the model's own.
TIMES_AS_WRONG = 3.0
#: And in roundings, for a model that is exact by luck: in float32 and float64, and in narrower numbers.
FLOOR_ROUNDINGS = {torch.float32: 16, torch.float64: 16}
FLOOR_ROUNDINGS_NARROW = 4
#: How far from 1 the sum of numbers may be that are taken for probabilities.
_NEAR_ONE = 1e-2


def truth_of(own: list[Tensor], exactly: Callable[[], list[Tensor]]) -> tuple[list[Tensor], float]:
    """Return the truth about a model's outputs, and the relative error that whatever stands in for it may have.

    ``exactly`` computes them in float64; of a model that computes in one dtype only it raises, and its own outputs are
    the truth.
    """
    dtype = next((each.dtype for each in reversed(own) if each.is_floating_point()), torch.float32)
    floor = FLOOR_ROUNDINGS.get(dtype, FLOOR_ROUNDINGS_NARROW) * torch.finfo(dtype).eps
    try:
        exact = exactly()
        return exact, TIMES_AS_WRONG * relative_error(own, exact) + floor
    except Exception:
        return own, TIMES_AS_WRONG * floor


def double_copy(model: nn.Module) -> nn.Module:
    """Return a copy that computes in float64, of a model that other threads may be running."""
    return copy.deepcopy(shallow_copy(model, {})).double()


def relative_error(outputs: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest error of all outputs, each relative to its largest magnitude; NaN if any is."""
    errors = [
        (y.double() - truth).abs().max() / truth.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        for y, truth in zip(outputs, exact, strict=True)
        if truth.numel()
    ]
    return float(torch.stack(errors).max()) if errors else 0.0


def are_probabilities(y: Tensor) -> bool:
    """Return whether rows [N, K] are probabilities, whose sums are 1 but for rounding, of bfloat16 too."""
    return bool((y >= 0).all() and ((y.double().sum(1) - 1).abs() < _NEAR_ONE).all())


def in_double(x: Tensor) -> Tensor:
    """Return an input for a model in float64; indices stay what they are."""
    return x.double() if x.is_floating_point() else x
