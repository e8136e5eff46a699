"""The input of a head as its kernel reads it: one strided [N, C, H, W] view, whatever the user's layout."""

from typing import NamedTuple

from torch import Tensor


class HeadView(NamedTuple):
    """A view of x with its pooling grid.

    Feature ``(c * grid_h + i) * grid_w + j`` of a sample is channel c pooled over window (i, j).
    """

    x: Tensor
    """[N, C, H, W], sharing memory with the input."""
    grid_h: int
    grid_w: int

    @property
    def positions(self) -> int:
        """Windows of a channel."""
        return self.grid_h * self.grid_w

    @property
    def window_h(self) -> int:
        """Height of the tallest window."""
        return _longest_window(self.x.shape[2], self.grid_h)

    @property
    def window_w(self) -> int:
        """Width of the widest window."""
        return _longest_window(self.x.shape[3], self.grid_w)


def head_view(x: Tensor, pool: str, pool_size: tuple[int, int]) -> HeadView:
    """View checked arguments of a head as a map, merging dimensions wherever the strides allow it.

    Merged dimensions make long windows out of short rows: a contiguous 56x56 map under global pooling is one row of
    3,136 elements, and a contiguous map that is not pooled at all is one vector.
    """
    if x.ndim == 2:
        return HeadView(x[:, :, None, None], 1, 1)
    if x.ndim == 3:
        if pool == "first":
            return HeadView(x[:, 0, :, None, None], 1, 1)
        if pool == "none":
            return _unpooled(x[:, :, :, None])
        return HeadView(x.transpose(1, 2)[:, :, None, :], 1, 1)
    if pool == "none":
        return _unpooled(x)
    if pool_size == (1, 1) and _mergeable(x, 2, 3):
        return HeadView(_merged(x, 2, 3)[:, :, None, :], 1, 1)
    return HeadView(x, *pool_size)


def _unpooled(x: Tensor) -> HeadView:
    """Every element of [N, C, H, W] is a feature of its own."""
    if _mergeable(x, 2, 3):
        rows = _merged(x, 2, 3)  # [N, C, H * W]
        if _mergeable(rows, 1, 2):
            return HeadView(_merged(rows, 1, 2)[:, :, None, None], 1, 1)
    return HeadView(x, x.shape[2], x.shape[3])


def _mergeable(x: Tensor, outer: int, inner: int) -> bool:
    return x.shape[outer] == 1 or x.shape[inner] == 1 or x.stride(outer) == x.stride(inner) * x.shape[inner]


def _merged(x: Tensor, outer: int, inner: int) -> Tensor:
    """Merge two neighbouring dimensions of which :func:`_mergeable` said that one stride serves both."""
    step = x.stride(outer) if x.shape[inner] == 1 else x.stride(inner)
    size = (*x.shape[:outer], x.shape[outer] * x.shape[inner], *x.shape[inner + 1 :])
    stride = (*x.stride()[:outer], step, *x.stride()[inner + 1 :])
    return x.as_strided(size, stride, x.storage_offset())


def _longest_window(size: int, windows: int) -> int:
    """Longest window of an adaptive pool: window i spans floor(i * size/windows) to ceil((i + 1) * size/windows)."""
    if size % windows == 0:
        return size // windows
    return max(-(-(i + 1) * size // windows) - i * size // windows for i in range(windows))
