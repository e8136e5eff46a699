"""HeadView: a head's input as its kernel reads it, one strided [N, C, H, W] map, whatever the user's layout."""

from functools import lru_cache
from typing import NamedTuple

Sizes = tuple[int, ...]


class HeadView(NamedTuple):
    """Sizes and strides that turn the memory of x into a map with a pooling grid.

    Feature ``(c * grid_h + i) * grid_w + j`` of a sample is channel c pooled over window (i, j) of the grid.
    """

    shape: Sizes  # (N, C, H, W)
    strides: Sizes  # strides of (N, C, H, W), in elements, from the first element of x
    grid_h: int  # rows of the pooling grid: the windows of a channel's column; H if nothing is pooled
    grid_w: int  # its columns

    @property
    def sizes(self) -> Sizes:
        """What kernels take: C, H, W, rows and columns of the grid, and of the largest window."""
        return (*self.shape[1:], self.grid_h, self.grid_w, self.window_h, self.window_w)

    @property
    def positions(self) -> int:
        """Windows of a channel."""
        return self.grid_h * self.grid_w

    @property
    def unpooled(self) -> bool:
        """True if every element is a feature."""
        return self.shape[2:] == (self.grid_h, self.grid_w)

    @property
    def turned(self) -> bool:
        """True if unpooled and channels-last: to be transposed to the weight's order (``MapConstants.transposes``)."""
        return self.unpooled and self.positions > 1 and self.strides[1] == 1 and self.shape[1] > 1

    @property
    def in_weight_order(self) -> bool:
        """True if unpooled and not ``turned``: features lie in the order of the weight's columns."""
        return self.unpooled and not self.turned

    @property
    def window_h(self) -> int:
        """Rows of the tallest window."""
        return _longest_window(self.shape[2], self.grid_h)

    @property
    def window_w(self) -> int:
        """Columns of the widest window."""
        return _longest_window(self.shape[3], self.grid_w)


@lru_cache(maxsize=4096)
def head_view(shape: Sizes, strides: Sizes, pool: str, pool_size: tuple[int, int]) -> HeadView:
    """View the checked input of a head as a map, merging dimensions wherever the strides allow it.

    Merged dimensions make long windows out of short rows: a contiguous 56x56 map under global pooling is one row of
    3,136 elements, and a contiguous map that is not pooled at all is one vector.

    Shape and strides, in elements, are those of x; see :func:`auxhead.kernels.fused_head` for it and the pool.
    """
    if len(shape) == 2:
        return HeadView((*shape, 1, 1), (*strides, 0, 0), 1, 1)
    if len(shape) == 3:
        (samples, tokens, width), (stride_n, stride_t, stride_d) = shape, strides
        if pool == "first":
            return HeadView((samples, width, 1, 1), (stride_n, stride_d, 0, 0), 1, 1)
        if pool == "none":
            return _unpooled((*shape, 1), (*strides, 0))
        return HeadView((samples, width, 1, tokens), (stride_n, stride_d, 0, stride_t), 1, 1)
    if pool == "none" or pool_size == shape[2:]:  # windows of one element
        return _unpooled(shape, strides)
    if pool_size == (1, 1):
        rows = _merged(shape, strides, 2)
        if len(rows[0]) == 3:
            (samples, channels, length), (stride_n, stride_c, stride_w) = rows
            return HeadView((samples, channels, 1, length), (stride_n, stride_c, 0, stride_w), 1, 1)
    return HeadView(shape, strides, *pool_size)


def _unpooled(shape: Sizes, strides: Sizes) -> HeadView:
    """View [N, C, H, W] so that every element is a feature of its own."""
    features = _merged(*_merged(shape, strides, 2), 1)
    if len(features[0]) == 2:
        return HeadView((*features[0], 1, 1), (*features[1], 0, 0), 1, 1)
    return HeadView(shape, strides, shape[2], shape[3])


def _merged(shape: Sizes, strides: Sizes, dim: int) -> tuple[Sizes, Sizes]:
    """Merge dimension ``dim`` with the one after it, the last, if one stride serves both."""
    if len(shape) != dim + 2:
        return shape, strides
    (*outer_shape, outer, inner), (*outer_strides, outer_stride, inner_stride) = shape, strides
    if inner == 1:
        inner_stride = outer_stride
    elif outer != 1 and outer_stride != inner_stride * inner:
        return shape, strides
    return (*outer_shape, outer * inner), (*outer_strides, inner_stride)


def _longest_window(size: int, windows: int) -> int:
    """Longest window of an adaptive pool: window i spans floor(i * size/windows) to ceil((i + 1) * size/windows)."""
    if size % windows == 0:
        return size // windows
    return max(-(-(i + 1) * size // windows) - i * size // windows for i in range(windows))
