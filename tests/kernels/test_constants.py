"""launch/constants.py: what Triton is told that sizes and strides are multiples of, and heads read in vectors."""

import pytest
import torch
from auxhead.kernels.launch.constants import HeadConstants
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.kernels.reference.hidden_layers import NO_LAYERS
from support.head_cases import check_head, make_input, make_linear
from support.layouts import MAP_LAYOUTS


@pytest.mark.parametrize("layout", MAP_LAYOUTS)
def test_a_unit_divides_what_it_is_told_of(layout):
    units = set()
    for sizes in ((2, 24, 3, 8), (1, 40, 2, 4), (3, 18, 4, 6), (2, 64, 4, 4), (2, 5, 3, 3)):
        x = MAP_LAYOUTS[layout](torch.zeros, *sizes)
        for size in ((1, 1), (2, 2)):
            view = head_view(tuple(x.shape), x.stride(), "avg", size)
            weight = torch.zeros(7, view.shape[1] * view.positions)
            config = config_by_rule(HeadShape.of(view, 7, pool_max=False, dtype=x.dtype))
            own = HeadConstants.of(config, view, weight, pool_max=False, criterion="max_prob", hidden=NO_LAYERS)
            stride_n, stride_c, stride_h, stride_w = view.strides
            told = (view.shape[1], stride_n, stride_h, stride_w)
            if not own.channels_last:
                told = (view.shape[3], stride_n, stride_c, stride_h)
                assert own.map_unit == 1 or (own.one_window and stride_w == 1)
            assert all(number % own.map_unit == 0 for number in told)
            units.add(own.map_unit)
    assert {"channels_last": {2, 8, 16}, "nchw": {1, 8}}.get(layout, set()) <= units, units


@pytest.mark.parametrize("layout", ["nchw", "channels_last", "channels_last_slice", "padded_rows"])
@pytest.mark.parametrize("sizes", [(2, 24, 3, 8), (17, 18, 4, 6)])
def test_heads_of_such_maps_are_as_accurate_as_pytorch(sizes, layout):
    for pool, pool_size, classes in (("avg", 1, 40), ("max", 2, 130), ("none", 1, 3)):
        x = MAP_LAYOUTS[layout](lambda shape: make_input(shape, dtype=torch.float16), *sizes)
        features = x[0].numel() if pool == "none" else sizes[1] * pool_size**2
        check_head(x, *make_linear(features, classes, dtype=torch.float16), pool=pool, pool_size=pool_size)
