"""launch_rule.py, launch_config.py: a pure choice that covers the work and bounds what a program holds, and counts."""

import dataclasses
import math

import pytest
import torch
from auxhead.kernels import LaunchConfig
from auxhead.kernels.launch.constants import HeadConstants
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import HeadView
from auxhead.kernels.launch.launch_config import most_registers, next_power_of_2
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.kernels.reference.hidden_layers import NO_LAYERS
from hypothesis import example, given, settings
from hypothesis import strategies as st

HALF = torch.float16
SIZES = {
    "samples": st.integers(1, 70_000),
    "channels": st.integers(1, 4096) | st.just(200_704),
    "positions": st.integers(1, 100) | st.integers(1, 50_000),
    "window_h": st.integers(1, 256),
    "window_w": st.integers(1, 50_000),
    "classes": st.integers(1, 32_000),
    "pool_max": st.booleans(),
    "dtype": st.sampled_from([HALF, torch.float32]),
}


@settings(max_examples=500)
@given(**SIZES)
@example(samples=1, channels=1, positions=200_000, window_h=1, window_w=1, classes=1000, pool_max=False, dtype=HALF)
@example(samples=1, channels=3, positions=1, window_h=1, window_w=49, classes=200, pool_max=False, dtype=HALF)
@example(samples=257, channels=2048, positions=1, window_h=1, window_w=49, classes=1000, pool_max=False, dtype=HALF)
@example(samples=32, channels=300, positions=1, window_h=1, window_w=49, classes=1000, pool_max=False, dtype=HALF)
def test_choice_by_rule(samples, channels, positions, window_h, window_w, classes, pool_max, dtype):
    view = HeadView((samples, channels, window_h * positions, window_w), (0, 0, 0, 0), positions, 1)
    shape = HeadShape.of(view, classes, pool_max=pool_max, dtype=dtype)
    config = config_by_rule(shape)
    assert config == config_by_rule(shape)
    fields = dataclasses.asdict(config)
    several = config.block_n > 1 and channels * positions > config.block_f * config.block_s
    in_vectors = channels * positions % 16 == 0 and config.window_parts <= 4 and dtype.itemsize < 4
    assert fields.pop("weight_buffers") == (3 if several and in_vectors else 0), "what Triton can read ahead"
    if config.block_n > 1 and config.block_s > 1 and dtype.itemsize < 4:
        assert config.programs(view, classes).tiles <= 1024, "enough without any that share a tile's features"
    for name, value in fields.items():
        least = 0 if name in ("waits", "max_registers", "max_programs") else 1
        assert value >= least and value & (value - 1) == 0, f"{name} = {value} is no power of two"
    features = config.block_c * config.block_p
    if config.tiled:
        assert config.block_n == 1 or config.block_n >= 16, "tl.dot multiplies 16 and more"
        assert min(config.block_f, config.block_k) >= 16
        if config.block_n > 1 and dtype.itemsize == 4:
            all_features = channels * positions
            assert config.block_s == 8 or all_features < 2 * config.block_s * config.block_f, "a long sum of float32"
    else:
        assert config.block_n == config.block_f == 1, "the features of a program are those that it pooled"
    assert config.window_parts == 1 or not pool_max, "a maximum does not add up"
    assert config.num_warps <= 32

    # what one program holds at a time, in elements of 4 bytes; a streaming multiprocessor has 64 Ki registers
    limit = 32 * 1024
    assert features * config.block_a <= limit, "pool"
    assert config.block_k * (config.block_f if config.tiled else features) <= limit, "weight"
    assert config.block_n * (config.block_f + config.block_k) <= limit, "product"
    assert config.block_s * config.block_j <= limit, "softmax"

    # no block lies beyond the end of what it covers, and together they cover all of it
    programs = config.programs(view, classes)
    blocks_c, blocks_p = -(-channels // config.block_c), -(-positions // config.block_p)
    splits = programs.splits
    assert splits == blocks_c * blocks_p * config.window_parts
    for blocks, block, size in ((blocks_c, config.block_c, channels), (blocks_p, config.block_p, positions)):
        assert (blocks - 1) * block < size <= blocks * block
    if config.tiled:
        groups = math.ceil(samples / config.block_n)
        tiles = groups * math.ceil(classes / config.block_k) * config.block_s
        assert programs[1:4] == (samples * splits, tiles, samples)
        assert programs.zeroed == programs.features + programs.partial_sums
    else:
        assert programs[1:4] == (samples * splits, 0, 0) and programs.features == 0
        assert programs.zeroed == (programs.partial_sums if config.waits else samples)
    assert programs.partial_sums >= (1 if config.tiled else splits) * samples * classes


def test_where_the_ways_to_launch_begin():
    """By measurement; a table, not a rule, is for what is faster on a device."""

    def config(samples, classes, positions=4):
        view = HeadView((samples, 512, 7 * positions, 7), (0, 0, 0, 0), positions, 1)
        return config_by_rule(HeadShape.of(view, classes, pool_max=False, dtype=HALF))

    tiled = {(samples, classes) for samples in (31, 32) for classes in (127, 128) if config(samples, classes).tiled}
    assert tiled == {(32, 128)}
    waits = {(samples, classes) for samples in (63, 64) for classes in (100, 127) if config(samples, classes).waits}
    assert waits == {(63, 100), (63, 127)}
    view = {samples: HeadView((samples, 512, 1, 49), (0, 0, 0, 0), 1, 1) for samples in (3, 4)}
    spread = {
        (samples, classes)
        for samples in view
        for classes in (128, 129)
        if config_by_rule(HeadShape.of(view[samples], classes, pool_max=False, dtype=HALF)).tiled
    }
    assert spread == {(3, 129)}


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("samples", [1, 15, 16, 32, 128])
@pytest.mark.parametrize("features", [25_088, 200_704])
def test_partial_sums_of_wide_features_stay_few(features, samples, classes):
    """Flattened maps, as VGG's: partial sums take [splits, samples, classes] of memory."""
    view = HeadView((samples, features, 1, 1), (0, 0, 0, 0), 1, 1)
    shape = HeadShape.of(view, classes, pool_max=False, dtype=HALF)
    assert config_by_rule(shape).programs(view, classes).splits <= 512


def test_next_power_of_2():
    powers = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 1000: 1024, 1024: 1024, 1025: 2048}
    assert {n: next_power_of_2(n) for n in powers} == powers


@pytest.mark.parametrize("num_warps, registers", [(1, 255), (4, 255), (8, 255), (16, 128), (32, 64)])
def test_all_threads_of_a_program_share_the_registers_of_a_multiprocessor(num_warps, registers):
    """The CUDA manual's: 65,536 of 32 bits, and 255 of a thread at most."""
    assert most_registers(num_warps) == registers
    assert LaunchConfig(1, 16, 1, 64, 1, 16, 1, 16, 1, stages=1, num_warps=num_warps).register_limit == registers
    capped = LaunchConfig(1, 16, 1, 64, 1, 16, 1, 16, 1, stages=1, num_warps=num_warps, max_registers=40)
    assert capped.register_limit == 40


def view_of(samples, channels=70, grid=(3, 1)):
    return HeadView((samples, channels, 6, 9), (channels * 54, 54, 9, 1), *grid)


SPLIT = LaunchConfig(1, 16, 2, 8, 1, 32, 8, 64, 2, stages=1, num_warps=4)
TILED = LaunchConfig(16, 16, 2, 8, 32, 16, 4, 64, 2, stages=1, num_warps=4)


@pytest.mark.parametrize("waits", [False, True])
def test_programs_of_a_sample_leave_partial_logits(waits):
    """By hand: 70 channels in blocks of 16 are 5, 3 positions in pairs 2, halves of windows 2; 33 classes fill 48."""
    found = dataclasses.replace(SPLIT, waits=waits).programs(view_of(5), 33)
    sums = 20 * 5 * 48
    # what is waited for is zeroed, else a counter of each sample
    assert found == (20, 20 * 5, 0, 0, sums, 0, sums if waits else 5)
    assert (found.splits, found.pools, found.tiles, found.decisions) == (20, 100, 0, 0)
    assert (found.partial_sums, found.features, found.zeroed, found.total) == (sums, 0, sums if waits else 5, 100)


def test_tiles_multiply_what_other_programs_have_pooled():
    """By hand: 17 samples in groups of 16 are 2, 33 classes in tiles of 16 are 3, each of which 4 programs share."""
    found = TILED.programs(view_of(17), 33)
    features, sums = 2 * 17 * 70 * 3, 4 * 17 * 48
    assert found == (20, 20 * 17, 2 * 3 * 4, 17, sums, features, sums + features)
    assert found.total == 340 + 24 + 17
    exact = TILED.programs(view_of(32, channels=64, grid=(1, 2)), 48)
    assert exact == (8, 8 * 32, 2 * 3 * 4, 32, 4 * 32 * 48, 2 * 32 * 64 * 2, 4 * 32 * 48 + 2 * 32 * 64 * 2)


def test_one_program_alone_takes_all_features_and_classes():
    one = LaunchConfig(1, 128, 4, 8, 1, 64, 1, 64, 1, stages=1, num_warps=4)

    def is_alone(config, samples, classes):
        view = view_of(samples)
        options = {"pool_max": False, "criterion": "max_prob", "hidden": NO_LAYERS}
        return HeadConstants.of(config, view, classes, **options).alone

    assert one.splits_of(view_of(5)) == 1 and is_alone(one, 5, 64) and is_alone(one, 1, 9)
    assert not is_alone(one, 5, 65)
    changes = ({"block_k": 128}, {"block_j": 128}, {"block_c": 64}, {"window_parts": 2}, {"block_f": 16})
    for changed in changes:
        assert not is_alone(dataclasses.replace(one, **changed), 5, 64), changed
