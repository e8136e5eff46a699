"""launch_rule.py, launch_config.py: a pure choice that covers the work and bounds what a program holds, and counts."""

import dataclasses
import itertools
import math

import pytest
import torch
from auxhead.kernels import HiddenLayers, LaunchConfig
from auxhead.kernels.launch.constants import HeadConstants
from auxhead.kernels.launch.head_shape import DTYPES, LAYOUTS, REDUCTIONS, HeadShape
from auxhead.kernels.launch.head_view import HeadView
from auxhead.kernels.launch.launch_config import by_library, most_registers, next_power_of_2
from auxhead.kernels.launch.launch_rule import config_by_rule, config_of_norm, config_of_reading
from auxhead.kernels.launch.pooling_rule import packing
from auxhead.kernels.launch.tuned_table import config_from
from auxhead.kernels.reference.hidden_layers import NO_LAYERS
from hypothesis import example, given, settings
from hypothesis import strategies as st

HALF = torch.float16
SIZES = {
    "samples": st.sampled_from([1, 2, 8, 16, 32, 128]) | st.integers(1, 70_000),
    "channels": st.sampled_from([16, 64, 256, 512, 2048, 200_704]) | st.integers(1, 4096),
    "positions": st.just(1) | st.integers(1, 100) | st.integers(1, 50_000),
    "window_h": st.just(1) | st.integers(1, 256),
    "window_w": st.sampled_from([1, 4, 49, 64, 196, 784, 3136]) | st.integers(1, 50_000),
    "layout": st.sampled_from(LAYOUTS),
    "classes": st.sampled_from([2, 10, 100, 128, 200, 1000]) | st.integers(1, 32_000),
    "pool": st.sampled_from(REDUCTIONS),
    "dtype": st.sampled_from(DTYPES),
}
#: Bytes of shared memory that a program has on GPUs that have least of it, compute capability 8.6, 8.9 and 12.0.
SHARED_BYTES = 99 * 1024


def shape_of(samples, channels, positions, window_h, window_w, layout, classes, pool="avg", dtype="float16"):
    return HeadShape(
        samples, channels, window_h * positions, window_w, positions, 1, layout, pool, classes, dtype
    )  # fmt: skip


@settings(max_examples=500)
@given(**SIZES)
@example(1, 1, 200_000, 1, 1, "contiguous", 1000, "avg", "float16")
@example(1, 3, 1, 1, 49, "channels_last", 200, "avg", "float16")
@example(257, 2048, 1, 1, 49, "channels_last", 1000, "avg", "float16")
@example(32, 300, 1, 1, 49, "strided", 1000, "avg", "bfloat16")
@example(32, 64, 3136, 1, 1, "strided", 1000, "avg", "float16")
@example(64, 64, 4, 1, 1, "contiguous", 1000, "avg", "float16")
@example(64, 1, 4, 1, 1, "channels_last", 9000, "avg", "bfloat16")
def test_choice_by_rule(samples, channels, positions, window_h, window_w, layout, classes, pool, dtype):
    shape = shape_of(samples, channels, positions, window_h, window_w, layout, classes, pool, dtype)
    config, size = config_by_rule(shape), shape.element_size
    assert config == config_by_rule(shape)
    assert config_from(dataclasses.asdict(config), shape) == config, "what a table may say"
    several = config.block_n > 1 and channels * positions > config.block_f * config.block_s
    in_vectors = channels * positions % 16 == 0 and config.window_parts <= 4 and size < 4
    if not config.reads:
        assert config.weight_buffers == (3 if several and in_vectors else 0), "what Triton can read ahead"
    if config.block_n > 1 and config.block_s > 1 and size < 4:
        assert config.programs(shape.view, classes).stages[1] <= 1024, "enough without any that share a tile's features"
    features = config.block_c * config.block_p
    assert size < 4 or config.reads or config.block_n == 1, "tensor cores take float32 from memory alone"

    # what one program holds at a time, in elements of 4 bytes; a streaming multiprocessor has 64 Ki registers
    limit = 32 * 1024
    if not config.in_place:
        assert features * config.block_a <= limit, "pool"
    if config.reads:
        assert config.weight_buffers * config.block_f * (config.block_n + config.block_k) * size <= SHARED_BYTES
    else:
        assert config.block_k * (config.block_f if config.tiled else features) <= limit, "weight"
        assert config.block_n * (config.block_f + config.block_k) <= limit, "product"
        assert config.block_s * config.block_j <= limit, "softmax"
    assert config.block_n * config.block_k <= limit, "sums"

    # no block lies beyond the end of what it covers, and together they cover all of it
    programs = config.programs(shape.view, classes)
    blocks_c, blocks_p = -(-channels // config.block_c), -(-positions // config.block_p)
    splits = config.splits_of(shape.view)
    in_slices = classes > (4096 if samples <= 8 and (size < 4 or channels * positions <= 256) else 8192)
    assert splits == (0 if config.reads else blocks_c * blocks_p * config.window_parts)
    assert shape.view.unpooled or not config.in_place
    if not config.reads:
        for blocks, block, size in ((blocks_c, config.block_c, channels), (blocks_p, config.block_p, positions)):
            assert (blocks - 1) * block < size <= blocks * block
    if config.tiled:
        groups = math.ceil(samples / config.block_n)
        tiles = groups * math.ceil(classes / config.block_k) * config.block_s
        finishers = math.ceil(classes / config.block_j) if in_slices and config.reads else 1
        assert programs.stages == (samples * splits, tiles, samples * finishers)
        assert programs.arrivals == (samples if config.surveys_of(classes) else 0)
        pooled = 0 if config.reads else config.window_parts * samples * channels * positions
        assert programs.zeroed == programs.partial_sums + pooled + programs.arrivals
    else:
        assert programs.stages == (samples * splits, 0, 0)
        assert programs.zeroed == (programs.partial_sums if config.waits else samples)
    if config.surveys_of(classes):
        assert (programs.partial_sums, programs.findings) == (0, 4 * samples * math.ceil(classes / config.block_k))
    else:
        assert programs.partial_sums >= (1 if config.tiled else splits) * samples * classes
    if in_slices and config.reads:
        assert config.surveys_of(classes) and config.block_j >= 512, "many classes are decided about in slices"
        assert programs.stages[2] <= max(3 * 132, samples * math.ceil(classes / 8192)), (
            "by a few programs more than SMs"
        )
        assert config.block_n * config.block_k <= 64 * 128, "what a tile finds out has room"


@settings(max_examples=500)
@given(**SIZES)
@example(256, 64, 49, 1, 1, "channels_last", 1024, "avg", "float32")
@example(200, 512, 196, 1, 1, "channels_last", 128, "avg", "bfloat16")
def test_choice_for_a_norm(samples, channels, positions, window_h, window_w, layout, classes, pool, dtype):
    """Whatever a table says of the head without it."""
    shape = shape_of(samples, channels, positions, window_h, window_w, layout, classes, pool, dtype)
    config = config_of_norm(shape)
    assert config_from(dataclasses.asdict(config), shape) == config, "what a table may say"
    assert config.reads or config.block_n == 1, "all features of a sample, for the norm"


def ways(samples, classes, **head):
    """The ways to launch a head by rule, by samples and classes."""
    head = {"channels": 512, "positions": 1, "window_h": 1, "window_w": 49, "layout": "channels_last", **head}
    found = {}
    for one, other in itertools.product(samples, classes):
        config = config_by_rule(shape_of(one, classes=other, **head))
        found[one, other] = config.features if config.reads else "tiled" if config.tiled else "split"
    return found


#: Features that lie in x as they are, of vectors and of maps in rows; and in another order.
VECTORS = {"channels": 2048, "window_w": 1}
ROWS = {"channels": 256, "positions": 196, "window_w": 1, "layout": "contiguous"}
TURNED = {**ROWS, "layout": "channels_last"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_pooled_is_read_where_it_lies(dtype):
    """But for a map with channels side by side, which many classes turn once for all of them."""
    for head in (VECTORS, ROWS):
        found = ways((1, 8, 32, 256), (10, 1000, 20_000), dtype=dtype, **head)
        # few sums of one vector in float32 are sooner done without tensor cores
        one = "split" if dtype == "float32" and head is VECTORS else "in place"
        assert found.pop((1, 10)) == one and set(found.values()) == {"in place"}
    assert set(ways((1, 8, 32, 256), (1000, 20_000), dtype=dtype, **TURNED).values()) == {"packed"}
    assert "awaited" not in ways((1, 8, 32, 256), (2, 10), dtype=dtype, **TURNED).values()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head", [VECTORS, ROWS, {"channels": 2048, "layout": "channels_last"}])
def test_a_large_weight_is_read_once_for_many_samples(head, dtype):
    for samples in (8, 33, 64):
        given = {"channels": 512, "positions": 1, "window_h": 1, "window_w": 49, "layout": "contiguous", **head}
        shape = shape_of(samples, classes=20_000, dtype=dtype, **given)
        config = config_by_rule(shape)
        most = 32 if dtype == "float32" else 64  # sums of so many leave room for what a tile finds out about them
        assert config.reads and config.block_n >= min(samples, most)
        tiles = config.programs(shape.view, 20_000).stages[1]
        assert tiles * config.block_k >= 20_000 and tiles >= 99, "and by most multiprocessors at least"


def test_pooled_heads_of_small_weights_are_split_or_tiled():
    """Few programs that do all for a sample, until there are many samples and classes."""
    found = ways((1, 8, 32), (2, 10, 128))
    assert {found[1, 2], found[1, 10], found[8, 10], found[32, 10]} == {"split"} and found[32, 128] == "tiled"


@pytest.mark.parametrize("classes", [10, 1000])
@pytest.mark.parametrize("samples", [1, 15, 16, 32, 128])
@pytest.mark.parametrize("features", [25_088, 200_704])
def test_partial_sums_of_wide_features_stay_few(features, samples, classes):
    """Flattened maps, as VGG's: partial sums take [splits, samples, classes] of memory."""
    view = HeadView((samples, features, 1, 1), (0, 0, 0, 0), 1, 1)
    shape = HeadShape.of(view, classes, pool_max=False, dtype=HALF)
    programs = config_by_rule(shape).programs(view, classes)
    assert programs.partial_sums <= 512 * samples * next_power_of_2(classes)


def test_next_power_of_2():
    powers = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 1000: 1024, 1024: 1024, 1025: 2048}
    assert {n: next_power_of_2(n) for n in powers} == powers


@pytest.mark.parametrize("num_warps, registers", [(1, 255), (4, 255), (8, 255), (16, 128), (32, 64)])
def test_all_threads_of_a_program_share_the_registers_of_a_multiprocessor(num_warps, registers):
    """The CUDA manual's: 65,536 of 32 bits, and 255 of a thread at most."""
    assert most_registers(num_warps) == registers and most_registers(num_warps, 40) == 40


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
    assert found[:3] == ((20 * 5, 0, 0), sums, sums if waits else 5)
    assert found.total == 100


def test_tiles_multiply_what_other_programs_have_pooled():
    """By hand: 17 samples in groups of 16 are 2, 33 classes in tiles of 16 are 3, each of which 4 programs share."""
    found = TILED.programs(view_of(17), 33)
    features, sums = 2 * 17 * 70 * 3, 4 * 17 * 48
    assert found[:3] == ((20 * 17, 2 * 3 * 4, 17), sums, sums + features)
    assert found.total == 340 + 24 + 17
    exact = TILED.programs(view_of(32, channels=64, grid=(1, 2)), 48)
    assert exact[:3] == ((8 * 32, 2 * 3 * 4, 32), 4 * 32 * 48, 4 * 32 * 48 + 2 * 32 * 64 * 2)


def test_tiles_read_what_lies_in_memory():
    """By hand: 17 samples in groups of 8 are 3. Packed or in place: nobody pools in this launch."""
    config = dataclasses.replace(TILED, block_n=8, window_parts=1, weight_buffers=2, features="packed")
    sums, vectors = 4 * 17 * 48, HeadView((17, 210, 1, 1), (210, 1, 0, 0), 1, 1)
    in_place = dataclasses.replace(config, features="in place")
    for one, view in ((config, view_of(17)), (in_place, vectors)):
        assert one.programs(view, 33)[:3] == ((0, 3 * 3 * 4, 17), sums, sums)
        # a norm has programs of its own, which leave two numbers of each sample
        norm = one.programs(view, 33, HiddenLayers(eps=1e-5))
        assert norm.stages[1] == 3 * 3 * 4 + 17 and norm.zeroed == sums + 2 * 17


def test_programs_share_probabilities():
    """By hand: 33 classes are 3 slices of 16, and 5 parts of 8; each sample has a counter."""
    config = dataclasses.replace(
        TILED, block_n=8, block_p=1, block_s=1, block_j=8, window_parts=1, weight_buffers=2, features="packed"
    )
    found = config.programs(view_of(17), 33)
    assert found[:3] == ((0, 3 * 3, 5 * 17), 0, 17) and found.findings == 4 * 17 * 3 and found.arrivals == 17
    norm = config.programs(view_of(17), 33, HiddenLayers(eps=1e-5))
    assert norm.stages[1] == 3 * 3 + 17 and norm.zeroed == 3 * 17
    assert not config.surveys_of(8), "a program has them all"
    assert not dataclasses.replace(config, block_s=2).surveys_of(33), "sums that are shared are added up first"
    whole = dataclasses.replace(config, block_s=2).programs(view_of(17), 33)
    assert whole.findings == 0 and whole.stages[2] == 17 and whole.zeroed == 2 * 17 * 48


def test_a_last_layer_has_programs_of_its_own():
    """By hand: 33 hidden features fill 48, 100 classes 112, in tiles of 32 classes by 32 samples 4."""
    hidden = HiddenLayers(weight=torch.zeros(33, 210))
    found = dataclasses.replace(TILED, last_rows=32).programs(view_of(17), 100, hidden)
    assert found.stages == (20 * 17, 2 * 3 * 4, 17, 4, 17) and found.total == sum(found.stages)
    assert found.last_sums == 17 * (48 + 112)
    assert found.zeroed == found.last_sums + TILED.programs(view_of(17), 33).zeroed


def test_one_program_alone_takes_all_features_and_classes():
    one = LaunchConfig(1, 128, 4, 8, 1, 64, 1, 64, 1, stages=1, num_warps=4)

    def is_alone(config, samples, classes):
        view = view_of(samples)
        options = {"pool_max": False, "criterion": "max_prob", "hidden": NO_LAYERS}
        return HeadConstants.of(
            config, view, torch.empty(classes, view.shape[1] * view.positions), **options
        ).one_program

    assert one.splits_of(view_of(5)) == 1 and is_alone(one, 5, 64) and is_alone(one, 1, 9)
    assert not is_alone(one, 5, 65)
    changes = ({"block_k": 128}, {"block_j": 128}, {"block_c": 64}, {"window_parts": 2}, {"block_f": 16})
    for changed in changes:
        assert not is_alone(dataclasses.replace(one, **changed), 5, 64), changed


def test_large_maps_are_read_by_many_programs():
    """An average in parts; a maximum, of which there are none, in blocks of fewer channels."""
    average = config_by_rule(shape_of(1, 72, 9, 18, 18, "channels_last", 2))
    assert average.window_parts > 1 and average.splits_of(shape_of(1, 72, 9, 18, 18, "channels_last", 2).view) >= 64
    assert config_by_rule(shape_of(1, 72, 9, 6, 6, "channels_last", 2)).window_parts == 1, "small windows"
    assert config_by_rule(shape_of(2, 180, 4, 12, 13, "channels_last", 40)).window_parts == 1, "tiles have no registers"
    for samples, channels, side in ((1, 51, 33), (8, 121, 56)):
        shape = shape_of(samples, channels, 1, 1, side * side, "contiguous", 10, pool="max")
        assert samples * config_by_rule(shape).splits_of(shape.view) >= 51
    rows = shape_of(1, 64, 1, 112, 12, "channels_last", 1000, pool="max")
    assert config_by_rule(rows).block_a <= 16, "no block reaches beyond a row"


def test_float32_is_not_read_ahead_number_by_number():
    for samples, features, buffers in ((32, 261, 1), (32, 262, 4), (32, 264, 4), (64, 261, 1)):
        shape = shape_of(samples, features, 1, 1, 1, "contiguous", 266, dtype="float32")
        assert config_of_reading(shape, "in place").weight_buffers == buffers


def test_few_channels_are_packed_by_many_programs():
    """Of one a sample each waits for memory 25 times: 27 x 56 x 56 and its product took 56 us, for 38 (H100).

    Of few maps in all each reads more at once: 2 x 64 x 56 x 56 and 3,753 classes 15 us, and 11.
    """
    for samples, channels, blocks in ((128, 27, (8, 256)), (128, 96, (64, 32)), (2, 64, (32, 512))):
        shape = shape_of(samples, channels, 1, 1, 3136, "channels_last", 21_843)
        config = packing(shape, by_library(21_843))
        assert (config.block_c, config.block_a) == blocks


def test_small_tiles_of_odd_rows_are_read_in_long_steps():
    """Which nothing reads ahead: each step waits for memory once."""
    for samples, features, classes, block_f in ((1, 2019, 21843, 128), (1, 2020, 21843, 64), (32, 505, 21843, 32)):
        shape = shape_of(samples, features, 1, 1, 1, "contiguous", classes)
        assert config_of_reading(shape, "in place").block_f == block_f


def test_a_large_weight_of_some_classes_or_odd_rows_are_read_by_all_multiprocessors():
    for features, programs in ((70_200, 64), (602_112, 128), (21_315, 128)):
        shape = shape_of(8, features, 1, 1, 1, "contiguous", 100)
        config = config_of_reading(shape, "in place")
        assert config.block_s * -(-100 // config.block_k) == programs


def test_float32_of_many_features_is_read_by_two_programs_a_multiprocessor():
    """Each of four warps, which multiply half a tile each: 32 x 200,704 before 1,000 classes 265 us, and not 587."""
    for samples, classes, programs in ((8, 1000, 256), (32, 1000, 256), (128, 1000, 256), (32, 5000, 158)):
        config = config_of_reading(
            shape_of(samples, 200_704, 1, 1, 1, "contiguous", classes, dtype="float32"), "in place"
        )
        tiles = -(-samples // config.block_n) * -(-classes // config.block_k)
        assert (config.num_warps, tiles * config.block_s) == (4, programs)


def test_many_features_of_few_classes_are_read_by_two_programs_a_multiprocessor():
    """Small steps leave memory idle: 2.8 million before 10 classes took 45 us, and 32."""
    for features, programs in ((1 << 18, 256), (200_704, 128)):
        assert config_of_reading(shape_of(1, features, 1, 1, 1, "contiguous", 10), "in place").block_s == programs


def test_many_classes_are_read_in_long_steps_for_64_samples_at_once():
    """Unless most of the second 64 would be none."""
    for samples, features, tile in (
        (128, 6144, (64, 64)),
        (128, 1024, (64, 64)),
        (67, 1024, (32, 64)),
        (128, 6146, (64, 32)),
    ):
        config = config_of_reading(shape_of(samples, features, 1, 1, 1, "contiguous", 21_843), "in place")
        assert (config.block_n, config.block_f) == tile


def test_maps_of_an_odd_width_are_pooled_in_long_pieces():
    """Number by number: 128 x 168 x 29 x 29 before 100 classes 18 us, and not 25."""
    for width, block_a in ((841, 256), (784, 64)):
        assert config_by_rule(shape_of(128, 168, 1, 1, width, "contiguous", 100)).block_a == block_a


def test_odd_channels_of_many_samples_are_packed():
    """A launch that only pools reads them soonest, which no vector can hold."""
    for channels, packs in ((583, True), (584, False)):
        config = config_by_rule(shape_of(128, channels, 1, 1, 49, "channels_last", 111, dtype="bfloat16"))
        assert config.packs is packs
