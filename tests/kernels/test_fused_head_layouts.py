"""fused_head.py, layouts: x, weight and bias are read in place, whatever their strides."""

import pytest
import torch
from auxhead.kernels import fused_head
from support.head_cases import DTYPES, assert_same_bits, check_head, feature_count, make_input, make_linear, readable
from support.layouts import MAP_LAYOUTS, TOKEN_LAYOUTS

pytestmark = pytest.mark.usefixtures("poisoned_empty", "tiles_from_7")

# each makes a view of shape (n, c, h, w) in memory that holds more, or less, or in another order
POOLINGS = {"avg1": ("avg", 1), "avg3": ("avg", 3), "max2x3": ("max", (2, 3)), "none": ("none", 1)}


def check_in_place(x, weight, bias, **pooling):
    """The answer is right and no input was written."""
    before = x.clone(), weight.clone(), None if bias is None else bias.clone()
    check_head(x, weight, bias, **pooling)
    for old, tensor in zip(before, (x, weight, bias), strict=True):
        assert tensor is None or torch.equal(old, tensor), "an input was written"


@pytest.mark.parametrize("samples", [2, 7, pytest.param(17, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", MAP_LAYOUTS.values(), ids=MAP_LAYOUTS)
def test_map_layouts(layout, samples, device):
    for pooling in POOLINGS.values():
        pool, pool_size = pooling
        if device.type == "cpu" and samples == 7 and pooling in (POOLINGS["avg3"], POOLINGS["none"]):
            continue  # both ways pool by the same code, and here many programs do
        shape = (samples, 3, 5, 4)
        x = layout(lambda s: make_input(s, device=device), *shape)
        assert tuple(x.shape) == shape
        weight, bias = make_linear(feature_count(shape, pool, pool_size), 40, device=device)
        check_in_place(x, weight, bias, pool=pool, pool_size=pool_size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=readable)
@pytest.mark.parametrize("layout", ["channels_last", "steps", "transposed_hw", "expanded_map"])
def test_map_layouts_in_half_precision(layout, dtype, device):
    shape = (3, 5, 7, 9)
    x = MAP_LAYOUTS[layout](lambda s: make_input(s, dtype=dtype, device=device), *shape)
    for pool, pool_size in (("avg", 1), ("max", 2)):
        weight, bias = make_linear(feature_count(shape, pool, pool_size), 10, dtype=dtype, device=device)
        check_in_place(x, weight, bias, pool=pool, pool_size=pool_size)


@pytest.mark.parametrize("layout", ["channels_last", "steps", "offset", "transposed_hw", "padded_rows"])
def test_map_layouts_with_dimensions_of_one(layout, device):
    """The stride of a dimension of one element says nothing."""
    for shape in [(2, 1, 6, 5), (2, 5, 1, 6), (2, 5, 6, 1), (1, 5, 1, 1), (3, 1, 1, 7)]:
        x = MAP_LAYOUTS[layout](lambda s: make_input(s, device=device), *shape)
        for pool in ("avg", "none"):
            weight, bias = make_linear(feature_count(shape, pool), 4, device=device)
            check_in_place(x, weight, bias, pool=pool)


@pytest.mark.parametrize("samples", [2, 7, pytest.param(17, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", TOKEN_LAYOUTS.values(), ids=TOKEN_LAYOUTS)
def test_token_layouts(layout, samples, device):
    for pool in ("avg", "max", "first", "none"):
        shape = (samples, 5, 9)
        x = layout(lambda s: make_input(s, device=device), *shape)
        weight, bias = make_linear(feature_count(shape, pool), 12, device=device)
        check_in_place(x, weight, bias, pool=pool)


@pytest.mark.parametrize("samples", [3, 7, pytest.param(17, marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", ["transposed", "steps", "offset", "expanded", "one_column"])
def test_vector_layouts(layout, samples, device):
    features = 21
    x = {
        "transposed": lambda: make_input((features, samples), device=device).t(),
        "steps": lambda: make_input((3 * samples, 2 * features), device=device)[::3, 1::2],
        "offset": lambda: make_input((samples + 1, features + 5), device=device)[1:, 5:],
        "expanded": lambda: make_input((1, features), device=device).expand(samples, features),
        "one_column": lambda: make_input((samples, 1), device=device).expand(samples, features),
    }[layout]()
    check_in_place(x, *make_linear(features, 5, device=device))


WEIGHT_LAYOUTS = {
    "transposed": lambda w: w.t().contiguous().t(),
    "steps": lambda w: w.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
    "offset": lambda w: torch.cat([w, w], 1)[:, w.shape[1] :],
    "same_rows": lambda w: w[:1].expand_as(w),
    "same_columns": lambda w: w[:, :1].expand_as(w),
}


@pytest.mark.parametrize("samples", [2, 7, pytest.param(17, marks=pytest.mark.long)])
def test_weight_layouts(samples, device):
    for layout in WEIGHT_LAYOUTS.values():
        x = make_input((samples, 6, 5, 5), device=device)
        weight, bias = make_linear(24, 11, device=device)
        check_in_place(x, layout(weight), bias, pool_size=2)


@pytest.mark.parametrize("layout", ["step", "offset", "expanded"])
def test_bias_layouts(layout, device):
    x = make_input((2, 9), device=device)
    weight, bias = make_linear(9, 11, device=device)
    strided = {
        "step": lambda: torch.stack([bias, bias + 100], 1)[:, 0],
        "offset": lambda: torch.cat([bias + 100, bias])[11:],
        "expanded": lambda: bias[:1].expand(11),
    }[layout]()
    check_in_place(x, weight, strided)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_views_of_one_buffer(dtype, device):
    """x, weight and bias that share memory: nothing is written to any of them."""
    buffer = make_input((1, 400), dtype=dtype, device=device)[0]
    before = buffer.clone()
    x, weight, bias = buffer[:60].view(3, 20), buffer[40:240].view(10, 20) / 4, buffer[100:110]
    first = check_head(x, weight, bias)
    assert_same_bits(first, fused_head(x, weight, bias, threshold=0.5))
    assert torch.equal(buffer, before)
