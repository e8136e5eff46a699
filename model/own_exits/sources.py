"""``Source``: a layer whose pooled output a head reads, and the numbers that tell pools apart."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .module_calls import ModuleCall

#: Roundings by which two ways to pool may differ, relative to a sample's largest feature; and of narrower numbers.
_ROUNDINGS, _ROUNDINGS_NARROW = 64, 8


class Source(NamedTuple):
    """A layer, and how its output is pooled to become the input of a head's linear layer."""

    call: ModuleCall
    pool: str
    pool_size: tuple[int, int]


def pools_for(y: Tensor, features: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the pools that make so many features of a sample of ``y``."""
    if y.ndim == 4:
        windows, rest = divmod(features, y.shape[1])
        side = math.isqrt(windows)
        whole = y.shape[2:] == (side, side)  # windows of one position each pool nothing
        if not rest and 0 < side * side == windows and side <= min(y.shape[2:]) and (side == 1 or not whole):
            yield from (("avg", (side, side)), ("max", (side, side)))
    elif y.ndim == 3 and y.shape[2] == features:
        yield from (("avg", (1, 1)), ("max", (1, 1)), ("first", (1, 1)))
    if math.prod(y.shape[1:]) == features:
        yield "none", (1, 1)


def telling(y: Tensor) -> Tensor:
    """Return numbers in the form of two samples by which pools can be told apart.

    In the first sample all differ, and in every other channel all are negative, as no ReLU leaves them. In the second
    each channel is zero but for one position, from the first to the last, so that what leaves out one of these is
    far off.
    """
    numbers = torch.Generator().manual_seed(0)
    dense = 8.0 * torch.randn(y.shape, generator=numbers) + 4.0
    channels = dense if y.ndim < 3 else dense.movedim(1 if y.ndim == 4 else 2, 1).flatten(2)  # views
    channels[:, 1::2] = -channels[:, 1::2].abs()
    if y.ndim > 2:
        count, positions = channels.shape[1:]
        which = torch.arange(count)
        alone = torch.zeros(count, positions)
        alone[which, which * (positions - 1) // max(count - 1, 1)] = channels[0, :, 0].abs() + 1.0
        channels[1] = alone
    return torch.empty_like(y).copy_(dense)


def near(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether vectors [N, D] are the same but for rounding."""
    if mine.shape != theirs.shape or not theirs.is_floating_point():
        return False
    roundings = _ROUNDINGS if theirs.dtype in (torch.float32, torch.float64) else _ROUNDINGS_NARROW
    allowed = roundings * torch.finfo(theirs.dtype).eps * theirs.double().abs().amax(1, keepdim=True)
    return bool(((mine.double() - theirs.double()).abs() <= allowed).all())
