"""head_view.py, head_shape.py: the view shares x's memory and holds the right features; its shape stands for it."""

import pytest
import torch
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import HeadView, head_view
from hypothesis import given, settings
from hypothesis import strategies as st
from support.example_tables import map_strides
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS


def viewed(x, pool, pool_size):
    """The view of x, and the tensor [N, C, H, W] that the kernel sees through it."""
    view = head_view(tuple(x.shape), x.stride(), pool, pool_size)
    return view, x.as_strided(view.shape, view.strides, x.storage_offset())


def features_of(view, x):
    """Cut the windows out one by one: [N, C, positions], each position a list of its elements."""
    height, width = x.shape[2:]
    windows = []
    for i in range(view.grid_h):
        for j in range(view.grid_w):
            rows = slice(i * height // view.grid_h, -(-(i + 1) * height // view.grid_h))
            columns = slice(j * width // view.grid_w, -(-(j + 1) * width // view.grid_w))
            windows.append(x[:, :, rows, columns].flatten(2))
    return windows


def check_view(x, view, seen, pool, pool_size):
    assert len(view.shape) == len(view.strides) == 4 and view.shape[0] == x.shape[0]
    assert view.positions == view.grid_h * view.grid_w
    assert seen.numel() == (x[:, 0] if pool == "first" and x.ndim == 3 else x).numel(), "each element is read once"
    windows = features_of(view, seen)
    assert view.window_h * view.window_w >= max(window.shape[2] for window in windows)
    means = torch.stack([window.double().mean(2) for window in windows], 2).flatten(1)
    if pool == "first":
        wanted = x[:, 0].double()
    elif pool == "none" or x.ndim == 2:
        wanted = x.double().flatten(1)
    elif x.ndim == 3:
        wanted = x.double().mean(1)
    else:
        wanted = torch.nn.functional.adaptive_avg_pool2d(x.double(), pool_size).flatten(1)
    torch.testing.assert_close(means, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", MAP_LAYOUTS.values(), ids=MAP_LAYOUTS)
def test_maps(layout):
    for pool, size in (("avg", (1, 1)), ("avg", (3, 2)), ("max", (1, 1)), ("none", (1, 1))):
        for shape in ((2, 3, 5, 4), (2, 1, 5, 4), (2, 3, 1, 4), (2, 3, 5, 1), (1, 1, 1, 1)):
            x = layout(torch.randn, *shape)
            for windows in (size, shape[2:]):
                check_view(x, *viewed(x, pool, windows), pool, windows)


@pytest.mark.parametrize("layout", TOKEN_LAYOUTS.values(), ids=TOKEN_LAYOUTS)
def test_tokens(layout):
    for pool in ("avg", "max", "first", "none"):
        x = layout(torch.randn, 3, 5, 6)
        check_view(x, *viewed(x, pool, (1, 1)), pool, (1, 1))


@pytest.mark.parametrize("pool", ["avg", "max", "first", "none"])
def test_vectors(pool):
    for x in (torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(1, 5).expand(3, 5), torch.randn(6, 15)[::2, ::3]):
        view, seen = viewed(x, pool, (1, 1))
        assert view.shape == (3, 5, 1, 1) and (view.grid_h, view.grid_w) == (1, 1)
        check_view(x, view, seen, "none", (1, 1))


def test_what_can_be_merged_is_merged():
    x = torch.randn(2, 3, 56, 56)
    assert viewed(x, "avg", (1, 1))[0].shape == (2, 3, 1, 3136)
    assert viewed(x.to(memory_format=torch.channels_last), "avg", (1, 1))[0].shape == (2, 3, 1, 3136)
    assert viewed(x, "none", (1, 1))[0].shape == viewed(x, "max", (56, 56))[0].shape == (2, 3 * 3136, 1, 1)
    for strides in ((12, 4, 1, 99), (12, 4, 1, 1), (12, 4, 1, 0)):  # of one element, and so without a meaning
        assert head_view((2, 3, 4, 1), strides, "avg", (1, 1)) == ((2, 3, 1, 4), (12, 4, 0, 1), 1, 1)
        assert head_view((2, 3, 4, 1), strides, "none", (1, 1)).shape == (2, 12, 1, 1)
    assert head_view((2, 3, 1, 4), (12, 4, 99, 1), "avg", (1, 1)) == ((2, 3, 1, 4), (12, 4, 0, 1), 1, 1)
    assert head_view((2, 3, 4, 2), (48, 16, 4, 1), "avg", (1, 1)).shape == (2, 3, 4, 2), "a gap behind each row"


@settings(max_examples=200)
@given(size=st.integers(1, 300), windows=st.integers(1, 50))
def test_longest_window(size, windows):
    view = HeadView((1, 1, size, 1), (0, 0, 0, 0), windows, 1)
    bounds = [(i * size // windows, -(-(i + 1) * size // windows)) for i in range(windows)]
    assert view.window_h == max(end - start for start, end in bounds)


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
