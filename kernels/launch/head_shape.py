"""HeadShape: the key of a tuned launch configuration, with a head's sizes, layout, pool, classes and dtype."""

from typing import NamedTuple

import torch

from .head_view import HeadView

#: Memory layouts of x: channels lie side by side, or elements of a row do, or neither.
LAYOUTS = ("channels_last", "contiguous", "strided")
#: Dtypes of x and weight.
DTYPES = ("float16", "bfloat16", "float32")
#: Reductions of a window.
REDUCTIONS = ("avg", "max")


class HeadShape(NamedTuple):
    """A head as tables and the launch rule know it; sizes are those of its ``HeadView``.

    ``classes`` are the rows of the weight that reads the features: K, or those of a hidden layer. ``layout``, ``pool``
    ("avg" if nothing is pooled) and ``dtype`` are of ``LAYOUTS``, ``REDUCTIONS`` and ``DTYPES``.
    """

    samples: int
    channels: int
    height: int
    width: int
    grid_h: int
    grid_w: int
    layout: str
    pool: str
    classes: int
    dtype: str

    @classmethod
    def of(cls, view: HeadView, classes: int, *, pool_max: bool, dtype: torch.dtype) -> "HeadShape":
        """Describe a head by the arguments of ``choose_config``."""
        samples, channels, height, width = view.shape
        pool, name = "max" if pool_max and not view.unpooled else "avg", str(dtype).removeprefix("torch.")
        return cls(samples, channels, height, width, view.grid_h, view.grid_w, _layout(view), pool, classes, name)

    @property
    def features(self) -> int:
        """Features of a sample."""
        return self.channels * self.grid_h * self.grid_w

    @property
    def of_vectors(self) -> "HeadShape":
        """The head behind its pool, whose input are the features."""
        return self._replace(channels=self.features, height=1, width=1, grid_h=1, grid_w=1, layout="channels_last")

    @property
    def element_size(self) -> int:
        """Bytes of an element of x and weight."""
        return int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        windows = "" if self.grid_h == self.grid_w == 1 else f" in {self.grid_h}x{self.grid_w} windows"
        size = f"{self.channels}x{self.height}x{self.width}{windows}"
        return f"batch {self.samples}, {size}, {self.pool}, {self.classes} classes, {self.dtype}, {self.layout}"

    @property
    def view(self) -> HeadView:
        """A view of this shape: in memory without gaps, or with every second element if ``layout`` is "strided"."""
        _, channels, height, width = shape = self[:4]
        if self.layout == "channels_last":
            strides = (channels * height * width, 1, width * channels, channels)
        else:
            gap = 1 if self.layout == "contiguous" else 2
            strides = (channels * height * width * gap, height * width * gap, width * gap, gap)
        return HeadView(shape, strides, self.grid_h, self.grid_w)


def _layout(view: HeadView) -> str:
    """Name the layout of a view; strides of dimensions of one element mean nothing and are not looked at."""
    (_, channels, height, width), (_, stride_c, stride_h, stride_w) = view.shape, view.strides
    if channels > 1 and stride_c == 1:
        return "channels_last"
    if width > 1 or height > 1:
        return "contiguous" if (stride_w if width > 1 else stride_h) == 1 else "strided"
    return "strided" if channels > 1 else "channels_last"
