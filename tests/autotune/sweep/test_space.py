"""The space of configurations: what is excluded and why, what lies beside what; and how they are written."""

import dataclasses
import random
from collections import Counter
from itertools import product

import pytest
from auxhead.autotune.sweep.config_text import changes, text
from auxhead.autotune.sweep.exclusion import (
    ELEMENTS_PER_THREAD,
    FIELDS,
    GRID,
    READING,
    READING_RULES,
    RULES,
    SHARED_BYTES,
    Sizes,
    config_of,
    excluded,
)
from auxhead.autotune.sweep.space import _filled, grid, neighbours, readings, spread_out, way
from auxhead.kernels import LaunchConfig
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.kernels.launch.library_rule import config_of_library
from hypothesis import given, settings
from hypothesis import strategies as st


def shape_of(
    samples=1, channels=64, columns=3136, grid_h=1, grid_w=1, layout="channels_last", pool="avg", classes=1000
):
    height = 1 if grid_h == grid_w == 1 else columns
    return HeadShape(samples, channels, height, columns, grid_h, grid_w, layout, pool, classes, "float16")


REASONS = {reason for rules in RULES.values() for reason in rules}

#: The taps of ResNet-18.
TAPS = ((64, 3136), (128, 784), (256, 196), (512, 49))

powers = st.integers(0, 11).map(lambda bits: 1 << bits)
configs = st.builds(
    LaunchConfig,
    **{**{field.name: powers for field in dataclasses.fields(LaunchConfig)}, "waits": st.booleans()},
)
shapes = st.builds(
    HeadShape,
    samples=st.integers(1, 300),
    channels=st.integers(1, 2100),
    height=st.integers(1, 9),
    width=st.integers(1, 4000),
    grid_h=st.integers(1, 3),
    grid_w=st.integers(1, 3),
    layout=st.sampled_from(["channels_last", "contiguous", "strided"]),
    pool=st.sampled_from(["avg", "max"]),
    classes=st.integers(1, 2000),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
)


def test_what_is_launched_untuned_is_worth_trying():
    for tap, samples, classes in product(TAPS, (1, 8, 32, 128), (10, 1000)):
        shape = shape_of(samples, *tap, classes=classes)
        reason = excluded(config_by_rule(shape), shape)
        assert reason in (None, "reads ahead of more steps than there are"), "which costs nothing"
        beside = neighbours(config_by_rule(shape), shape)
        assert len(beside) >= 8 and all(excluded(config, shape) is None for config in beside)


def test_the_grid():
    shape = shape_of(32, 64, 49, pool="max")
    found = grid(shape)
    assert found == grid(shape), "in the same order"
    assert len(found) == len(set(found)) and {config.window_parts for config in found} == {1}
    assert {(config.block_n, config.tiled) for config in found} == {(1, False), (1, True), (16, True)}
    assert {config.block_n for config in grid(shape_of(3))} == {1}


def test_the_grid_leaves_out_what_is_excluded_and_nothing_else():
    shape = shape_of(32, 64, 49, pool="max")
    sizes, found, draw = Sizes(shape), set(grid(shape)), random.Random(0)
    points = [{name: draw.choice(values) for name, values in GRID.items()} for _ in range(8_000)]
    there = [point for point in points if point["window_parts"] == 1]
    configs = [config_of(_filled(point, sizes)) for point in [*points[:2_000], *there]]
    reasons = Counter(excluded(config, shape) for config in configs)
    assert all((config in found) == (excluded(config, shape) is None) for config in configs)
    assert reasons[None] and reasons["a maximum does not add up"]


@settings(max_examples=4)
@given(shapes)
def test_what_is_left_can_be_run(shape):
    """What the rules promise, said once more in other words."""
    sizes, found = Sizes(shape), grid(shape)
    for config in random.Random(0).sample(found, min(len(found), 20)):
        assert excluded(config, shape) is None
        assert config.block_n == 1 or shape.samples >= 4
        assert config.window_parts == 1 or shape.pool == "avg"
        assert config.splits_of(sizes.view) <= 512
        features = config.block_c * config.block_p
        tiles = [features * config.block_a, config.block_s * config.block_j]
        tiles += [config.block_k * (config.block_f if config.tiled else features), config.block_n * config.block_k]
        if config.tiled:
            assert min(config.block_f, config.block_k) >= 16, "tl.dot multiplies blocks of 16 and more"
            weight = 3 * config.block_k * config.block_f * sizes.element_size
            assert weight + config.block_n * config.block_f * 4 <= SHARED_BYTES
            assert config.block_s == 1 or config.block_s * config.block_f <= 2 * shape.channels * sizes.positions
            tiles.append(config.block_f * max(config.block_n, config.window_parts))
        assert max(tiles) <= ELEMENTS_PER_THREAD * 32 * config.num_warps
        if config.num_warps > 1:
            assert max(tiles) >= 32 * config.num_warps


BASE = LaunchConfig(1, 16, 1, 64, 1, 256, 4, 1024, 1, stages=1, num_warps=4)
TILED = {"block_n": 16, "block_f": 64, "block_s": 1, "block_k": 64}
ODD = [
    (TILED, {}, "groups mostly without samples"),
    ({"block_n": 16}, {"samples": 16}, "groups of samples want tiles"),
    ({**TILED, "block_n": 1, "block_k": 8}, {}, "fewer classes a tile than rows are padded to"),
    ({**TILED, "block_n": 1, "block_k": 64}, {"samples": 128}, "more tiles than a GPU has room for"),
    ({**TILED, "block_f": 16}, {"samples": 16, "channels": 1024}, "many steps along the features"),
    ({**TILED, "waits": True}, {"samples": 16}, "nobody to wait for"),
    ({"weight_buffers": 3}, {}, "buffers that nothing is read into"),
    ({"block_c": 128}, {}, "more channels than there are"),
    ({"block_p": 2}, {}, "more positions than there are"),
    ({"window_parts": 2}, {"pool": "max"}, "a maximum does not add up"),
    ({"window_parts": 64}, {}, "more parts than a window has steps"),
    ({"block_a": 128, "block_c": 64, "num_warps": 1}, {"samples": 128}, "more registers than a thread has"),
    ({"block_k": 2048}, {}, "more classes a step than there are"),
    ({"block_k": 16}, {}, "a product of many steps"),
    ({"num_warps": 16, "block_a": 4, "block_c": 4, "block_k": 64}, {"layout": "strided"}, "more threads than elements"),
    ({"block_s": 8}, {}, "more partial sums a step than there are"),
    ({**TILED, "block_s": 2}, {"samples": 16}, "more partial sums a step than there are"),
    ({**TILED, "block_s": 8, "block_k": 16}, {"samples": 128, "channels": 512}, "more tiles than a GPU has room for"),
    (
        {"stages": 4, "block_a": 1024, "block_c": 4},
        {"columns": 2000, "layout": "strided"},
        "reads ahead of more steps than there are",
    ),
    ({"block_c": 64, "block_a": 1, "block_k": 256}, {"columns": 3136}, "few programs for what they read"),
    ({"max_registers": 32}, {}, "registers that the tiles do not fit into"),
    ({"max_registers": 192, "num_warps": 16}, {}, "more registers than a multiprocessor has for a thread"),
    ({"block_a": 4}, {"layout": "contiguous"}, "columns that are less than a sector"),
    ({"block_c": 4}, {}, "channels that are less than a sector"),
    ({"block_c": 1024}, {"channels": 1024}, "more features than a program should pool"),
    ({"window_parts": 64, "block_a": 8}, {"channels": 512}, "more partial sums than a sample should have"),
    ({"block_a": 2048}, {}, "more columns than a window has"),
    ({**TILED, "block_k": 512}, {"samples": 16}, "more classes a tile than tl.dot should take"),
    ({**TILED, "block_f": 128}, {"samples": 16}, "more features a step than there are"),
    ({"block_j": 2048}, {}, "more classes of the softmax than there are"),
    ({"block_j": 32}, {}, "a softmax of many steps"),
    (
        {"block_n": 16, "block_k": 256, "block_f": 256, "block_s": 1, "num_warps": 16, "block_a": 128},
        {"samples": 16, "channels": 256},
        "more shared memory than there is",
    ),
    (
        {**TILED, "block_f": 512, "block_c": 64, "block_a": 16, "window_parts": 4, "num_warps": 16},
        {"samples": 32, "channels": 2048, "columns": 196},
        "more shared memory than there is",
    ),
    ({**TILED, "weight_buffers": 1}, {"samples": 16}, "buffers that nothing is read into"),
]  # fmt: skip


def test_reasons():
    for changed, head, reason in ODD:
        head = {"columns": 1024, **head}
        assert excluded(dataclasses.replace(BASE, **changed), shape_of(**head)) == reason, (changed, head)
    assert {row[2] for row in ODD} == REASONS, "every rule is among them"
    assert excluded(BASE, shape_of(columns=1024)) is None, "so each change above is what the reason speaks of"


@settings(max_examples=4)
@given(shapes, st.integers(0, 2**32))
def test_neighbours(shape, seed):
    found = grid(shape)
    if not found:
        return
    config = random.Random(seed).choice(found)
    beside = neighbours(config, shape)
    assert beside == neighbours(config, shape) and len(set(beside)) == len(beside) and config not in beside
    for other in beside:
        assert excluded(other, shape) is None
        changed = {name for name in FIELDS if getattr(other, name) != getattr(config, name)}
        assert (other.tiled, other.block_n) == (config.tiled, config.block_n)
        assert len(changed - {"block_s", "stages"}) <= 2 and len(changed) <= 4


def test_candidates_are_spread_out():
    shape = shape_of(32)
    found = spread_out(shape, 12)
    assert found == spread_out(shape, 12) and len(set(found)) == 12 and config_by_rule(shape) not in found
    assert found[:5] == spread_out(shape, 5)
    ways = [{way(one) for one in spread_out(each, 20)} for each in (shape_of(1), shape, VECTORS)]
    few = {("awaited", False, False), ("awaited", True, False), ("packed", True, True)}
    assert ways == [few, few | {("awaited", True, True)}, few | {("awaited", True, True), ("in place", True, True)}]
    varied = ("block_c", "block_a", "block_k", "num_warps")
    assert all(len({getattr(config, name) for config in found}) >= 2 for name in varied)
    few = shape_of(1, 1, 1, classes=1)
    assert len(spread_out(few, 500)) == len(set(grid(few)) - {config_by_rule(few)}) or len(spread_out(few, 500)) < 500


@pytest.mark.parametrize("sizes", [(2, 128, 196), (16, 64, 49)])
def test_candidates_begin_with_what_is_usual_of_the_other_ways(sizes):
    """However few there are: nothing else leads from one way to multiply to another."""
    shape = shape_of(*sizes)
    begun = {way(one) for one in (config_by_rule(shape), *spread_out(shape, 5))}
    allowed = {way(one) for one in (*grid(shape), *readings(shape))}
    # split, a program of the rule's pools too much for a small one
    assert begun | {("awaited", False, False)} == allowed


def test_candidates_of_a_tiled_rule_have_what_is_usual_of_its_own_way():
    """Of heads that leave 10 % of the time to others the rule's configuration was too many steps away (H200)."""
    for sizes in ((32, 128, 784), (128, 64, 784), (32, 64, 3136)):
        rule, begun = config_by_rule(shape_of(*sizes)), spread_out(shape_of(*sizes), 4)
        own = [one for one in (rule, *begun) if one.block_n == rule.block_n]
        assert rule.block_n == 16 and {(one.num_warps, one.stages > 1) for one in own} >= {(8, False), (4, True)}


def test_candidates_of_few_classes_begin_with_fewer_warps():
    for samples in (1, 8, 32, 128):
        shape = shape_of(samples, classes=10)
        rule, first = config_by_rule(shape), spread_out(shape, 1)[0]
        fewer = dataclasses.replace(rule, block_a=rule.block_a // 2, num_warps=rule.num_warps // 2)
        assert not rule.tiled and first == fewer


#: Heads that are not pooled: vectors, and maps with channels side by side.
VECTORS, TURNED = shape_of(32, 2048, 1), HeadShape(9, 256, 14, 14, 14, 14, "channels_last", "avg", 100, "float32")


#: Maps in few windows and many.
WINDOWS = [shape_of(64, 64, 9, 3, 3, layout="contiguous"), shape_of(64, 64, 18, 9, 9, layout="contiguous")]


@pytest.mark.parametrize("shape", [VECTORS, TURNED, shape_of(1), *WINDOWS])
def test_what_reads_features_in_memory(shape):
    found = readings(shape)
    assert found == readings(shape) and len(found) == len(set(found)) >= 10
    assert {one.features for one in found} == ({"packed", "in place"} if shape.view.unpooled else {"packed"})
    changed = set()
    for config in found[:1] + random.Random(0).sample(found, 9):
        for one in (config, *neighbours(config, shape)):
            assert one.features == config.features and excluded(one, shape) is None
            assert not one.in_place or one.block_f == one.block_c * one.block_p
            shared = one.weight_buffers * one.block_f * (one.block_n + one.block_k) * shape.element_size
            assert shared <= SHARED_BYTES
            changed |= {name for name in READING if getattr(one, name) != getattr(config, name)}
    assert changed | {"block_a", "stages", "block_n"} == set(READING)


PACKED = LaunchConfig(16, 16, 1, 64, 64, 64, 2, 1024, 1, 1, 4, weight_buffers=3, features="packed")
EXCLUDED = {
    "groups mostly without samples": {"block_n": 64},
    "more classes a tile than there are": {"block_k": 2048, "block_n": 8},
    "more features a step than there are": {"block_f": 1024},
    "more partial sums than there are steps": {"block_s": 16},
    "more tiles than a GPU has room for": {"block_k": 16, "block_f": 16, "block_s": 32},
    "more classes of the softmax than there are": {"block_j": 2048},
    "a softmax of many steps": {"block_j": 32},
    "more registers than a thread has": {"num_warps": 1, "block_n": 32, "block_k": 256, "block_f": 16},
    "more channels than there are": {"block_c": 2048, "block_a": 1},
    "more columns than a window has": {"block_a": 2048, "block_c": 1},
    "reads ahead of more steps than there are": {"stages": 32},
    "more shared memory than there is": {"block_k": 256, "block_f": 256, "num_warps": 8, "block_s": 1},
    "weight_buffers: got 0, wants 1 to 5 where features are packed": {"weight_buffers": 0},
}


def test_reasons_of_what_reads_features_in_memory():
    shape = shape_of(32, 512, 1024)
    assert excluded(PACKED, shape) is None and {*READING_RULES} < {*EXCLUDED}
    for reason, changed in EXCLUDED.items():
        assert excluded(dataclasses.replace(PACKED, **changed), shape) == reason
    # what packs has warps of its own, however few the product has
    for block_a, reason in ((1024, None), (2048, "more registers than a thread has")):
        assert excluded(dataclasses.replace(PACKED, num_warps=1, block_a=block_a), shape) == reason


def test_text_and_what_of_it_differs():
    assert text(BASE) == "n1-c16-p1-a64-f1-k256-s4-j1024-parts1-stages1-warps4"
    capped = dataclasses.replace(BASE, max_registers=64, max_programs=32)
    assert text(capped) == "n1-c16-p1-a64-f1-k256-s4-j1024-parts1-stages1-warps4-registers64-programs32"
    packed, in_place = (dataclasses.replace(BASE, features=one) for one in ("packed", "in place"))
    assert text(packed) == f"{text(BASE)}-packed" and changes(in_place, packed) == "in_place"
    assert changes(dataclasses.replace(BASE, last_rows=64), packed) == "last64 awaited"
    assert changes(BASE, BASE) == "as by rule"
    other = dataclasses.replace(BASE, block_c=32, num_warps=8, max_programs=64)
    assert (changes(other, BASE), changes(BASE, other)) == ("c32 warps8 programs64", "c16 warps4 programs0")


def test_every_field_has_neighbours():
    """From one configuration or another, all are varied but a few.

    They are how many samples are multiplied together, the cap of programs, which won none of 480 heads (H200), where
    features lie, and what is of heads with hidden layers alone.
    """
    changed = set()
    for shape in (shape_of(8), shape_of(32), shape_of(32, 8, 28, 4, 4)):
        for config in [config_by_rule(shape), *spread_out(shape, 4)]:
            for other in neighbours(config, shape):
                changed |= {name for name in FIELDS if getattr(other, name) != getattr(config, name)}
    others = {"max_programs", "features", "last_rows"}
    assert {"block_n", *changed} == set(FIELDS) == {field.name for field in dataclasses.fields(LaunchConfig)} - others


def test_candidates_of_more_classes_than_tiles_fit():
    for samples, classes in ((1024, 21841), (256, 100000)):
        shape = shape_of(samples, 512, 49, classes=classes)
        assert all(excluded(one, shape) is None for one in spread_out(shape, 20))


def test_a_librarys_product_is_allowed_and_stands_alone():
    for sizes in ((8, 64, 49), (8, 512, 1)):
        shape = shape_of(*sizes)
        config = config_of_library(shape, shape.classes)
        assert excluded(config, shape) is None and not neighbours(config, shape)
        assert text(config).endswith("-library") and way(config) not in {way(one) for one in grid(shape)}
