"""Checks of a fused head's parameters, before a launch reads them as they lie in memory."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..kernels.head_arguments import head_dtypes, head_dtypes_in_words
from .arguments import is_plain, tensor_in_words


def check_map_size(x: Any, size: tuple[int, int] | None) -> None:
    """Raise ``ValueError`` for another map than the one that the window of an AvgPool2d is as large as."""
    if size is not None and isinstance(x, Tensor) and (x.ndim != 4 or x.shape[2:] != size):
        raise ValueError(
            f"x: got shape {list(x.shape)}, wants maps of {size[0]}x{size[1]}: the head was made of an AvgPool2d with "
            "this window, and stands for it there alone"
        )


def check_readable(parameters: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ``ValueError`` for a parameter that is not what its memory says, or of a dtype that no head computes in."""
    for name, tensor in parameters:
        if tensor is None:
            continue
        if not is_plain(tensor) or tensor.is_neg():
            got = "a lazily negated one" if is_plain(tensor) else tensor_in_words(tensor)
            raise ValueError(f"{name}: got {got}, wants a plain tensor")
        if tensor.dtype not in head_dtypes(tensor.device):
            wants = head_dtypes_in_words(tensor.device)
            raise ValueError(f"{name}: got {tensor.dtype} on {tensor.device}, wants {wants}")
