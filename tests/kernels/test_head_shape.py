"""head_shape.py: the key of a tuned head, and the view that stands for it."""

import pytest
import torch
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import HeadView, head_view
from hypothesis import given
from hypothesis import strategies as st
from support.example_tables import TAPS, head_shape, map_strides
from support.head_cases import readable


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("tap", TAPS, ids=readable)
def test_shape_of_a_tap(tap, layout):
    channels, height, width = tap
    shape = head_shape(tap, 8, classes=1000, layout=layout, pool="max", dtype=torch.bfloat16)
    assert shape == (8, channels, 1, height * width, 1, 1, layout, "max", 1000, "bfloat16")


NAMED = {
    "tokens": ((2, 5, 8), (40, 8, 1), "avg", "channels_last"),
    "pooled vectors": ((2, 8), (8, 1), "avg", "channels_last"),
    "every second feature": ((2, 8), (16, 2), "avg", "strided"),
    "flattened map": ((2, 8, 3, 3), (72, 9, 3, 1), "none", "channels_last"),
    "NCHW whose columns are cut": ((2, 8, 3, 3), (96, 12, 4, 1), "avg", "contiguous"),
    "every second column": ((2, 8, 3, 3), (144, 18, 6, 2), "avg", "strided"),
    "one channel, NCHW": ((2, 1, 3, 3), (9, 9, 3, 1), "avg", "contiguous"),
    "one channel, channels_last": ((2, 1, 3, 3), (9, 1, 3, 1), "avg", "contiguous"),
    "1x1 NCHW": ((2, 8, 1, 1), (8, 1, 1, 1), "avg", "channels_last"),
    "1x1 channels_last": ((2, 8, 1, 1), (8, 1, 8, 8), "avg", "channels_last"),
    "one element": ((2, 1, 1, 1), (1, 1, 1, 1), "avg", "channels_last"),
}


@pytest.mark.parametrize("shape, strides, pool, layout", NAMED.values(), ids=NAMED)
def test_layout_is_that_of_the_memory(shape, strides, pool, layout):
    view = head_view(shape, strides, pool, (1, 1))
    assert HeadShape.of(view, 10, pool_max=False, dtype=torch.float32).layout == layout


SEEN = {
    "two channels side by side": ((2, 2, 3, 3), (18, 1, 6, 2), "channels_last"),
    "rows of two": ((2, 3, 1, 2), (6, 2, 99, 1), "contiguous"),
    "rows of two with gaps": ((2, 3, 1, 2), (12, 4, 1, 2), "strided"),
    "a column": ((2, 3, 4, 1), (12, 4, 1, 99), "contiguous"),
    "a column with gaps": ((2, 3, 4, 1), (24, 8, 2, 1), "strided"),
    "two rows": ((2, 3, 2, 1), (6, 2, 1, 99), "contiguous"),
}


@pytest.mark.parametrize("shape, strides, layout", SEEN.values(), ids=SEEN)
def test_strides_of_one_element_mean_nothing(shape, strides, layout):
    assert HeadShape.of(HeadView(shape, strides, 1, 1), 10, pool_max=False, dtype=torch.float32).layout == layout


@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (1, 4, 2, 3), (3, 2, 6, 2)], ids=readable)
def test_strides_of_its_view_are_those_of_pytorch(sizes):
    samples, channels, height, width = sizes
    memory = {
        "contiguous": torch.empty(sizes),
        "channels_last": torch.empty(sizes).to(memory_format=torch.channels_last),
        "strided": torch.empty(samples, channels, height, 2 * width)[..., ::2],
    }
    for layout, x in memory.items():
        view = HeadShape(*sizes, 2, 3, layout, "avg", 10, "float16").view
        assert view == HeadView(sizes, x.stride(), 2, 3)


def test_a_shape_in_words():
    words = {
        (1, 1): "batch 8, 64x7x5, max, 10 classes, float16, strided",
        (2, 1): "batch 8, 64x7x5 in 2x1 windows, max, 10 classes, float16, strided",
        (1, 3): "batch 8, 64x7x5 in 1x3 windows, max, 10 classes, float16, strided",
        (2, 2): "batch 8, 64x7x5 in 2x2 windows, max, 10 classes, float16, strided",
    }
    for grid, said in words.items():
        assert str(HeadShape(8, 64, 7, 5, *grid, "strided", "max", 10, "float16")) == said


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 9), st.integers(1, 9)),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    layout=st.sampled_from(["channels_last", "contiguous"]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    pool_max=st.booleans(),
)
def test_a_shape_stands_for_its_view(sizes, grid, layout, dtype, pool_max):
    """What tools make of a shape alone is what a call with that input would get."""
    view = HeadView(sizes, map_strides(sizes, layout), *grid)
    shape = HeadShape.of(view, 7, pool_max=pool_max, dtype=dtype)
    assert HeadShape.of(shape.view, 7, pool_max=pool_max, dtype=dtype) == shape
    for name in ("shape", "grid_h", "grid_w", "positions", "window_h", "window_w"):
        assert getattr(shape.view, name) == getattr(view, name), name
    strided = shape._replace(channels=2, layout="strided")
    assert HeadShape.of(strided.view, 7, pool_max=pool_max, dtype=dtype) == strided
