"""The search space: launch configurations of one head that are worth trying, and the neighbours of each.

A grid over the fields that matter most, the others following from them, and one of its own where features lie in memory
before they are multiplied; and from any configuration the ones a step away, along every field. ``exclusion`` says what
is left out, and why.
"""

import dataclasses
import random
from functools import lru_cache
from itertools import product, zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import FEATURES, MOST_TILES, WEIGHT_BUFFERS, LaunchConfig, next_power_of_2
from ...kernels.launch.launch_rule import config_by_rule, config_of_reading, config_of_split, waits_by_rule
from ...kernels.launch.pooling_rule import pooling
from ..records.record import grouped
from .exclusion import (
    ELEMENTS_PER_THREAD,
    FIELDS,
    FURTHER,
    GRID,
    MOST_FEATURES,
    READING,
    SHARED_BYTES,
    Point,
    Sizes,
    config_of,
    excluded,
    reason_among,
    steps,
)

#: Steps from a usual configuration within which candidates are spread out.
WITHIN = 5


def grid(shape: HeadShape, near: LaunchConfig | None = None) -> list[LaunchConfig]:
    """Return the grid's configurations for a head, in a fixed order; all, or those at most ``WITHIN`` steps away."""
    sizes = Sizes(shape)
    names = list(GRID)
    away = {name: [0 if near is None else _steps(value, near, name) for value in GRID[name]] for name in names}
    found: list[LaunchConfig] = []

    def extend(point: dict[str, int], fields: int, before: int) -> None:
        if fields == len(names):
            filled = _filled(point, sizes)
            if reason_among(sizes, filled, point, FURTHER) is None:
                found.append(config_of(filled))
            return
        name = names[fields]
        for value, steps_away in zip(GRID[name], away[name], strict=True):
            apart = before + steps_away
            if near is not None and fields < 2:  # how to multiply is told by the first two fields together
                apart = _apart({**point, name: value}, near)
            longer = dict(point)
            if apart <= WITHIN and reason_among(sizes, {name: value}, longer, [name]) is None:
                extend(longer, fields + 1, apart)

    extend({}, 0, 0)
    return found


def readings(shape: HeadShape) -> list[LaunchConfig]:
    """Return configurations that read features in memory, in a fixed order: the rule's, and other products of them."""
    found: dict[LaunchConfig, None] = {}
    count = Sizes(shape).features
    fields = [READING[name] for name in ("block_n", "block_k", "block_f")]
    for features in FEATURES[1:] if shape.view.unpooled else FEATURES[1:2]:
        usual = config_of_reading(shape, features)
        found[usual] = None
        for block_n, block_k, block_f, more in product(*fields, (1, 2)):
            step = block_f * (block_n + block_k) * shape.element_size
            tiles = -(-shape.samples // block_n) * -(-shape.classes // block_k)
            config = dataclasses.replace(
                usual,
                block_n=block_n,
                block_k=block_k,
                block_f=block_f,
                block_c=usual.block_c if usual.packs else max(block_f // usual.block_p, 1),
                block_s=1 << max(min(more * _ENOUGH_TILES // 2 // tiles, count // block_f), 1).bit_length() - 1,
                num_warps=8 if block_k >= 64 else 4,
                weight_buffers=min(max(SHARED_BYTES // step, 2), 4),
            )
            if excluded(config, shape) is None:
                found[config] = None
    return list(found)


def way(config: LaunchConfig) -> tuple[str, bool, bool]:
    """Return how a configuration multiplies: neighbours do alike."""
    return config.features, config.tiled, config.block_n > 1


def _filled(point: Point, sizes: Sizes) -> dict[str, int]:
    """Add the fields that the grid leaves open, about as :func:`config_by_rule` chooses them."""
    tiled = point["block_f"] > 1
    block_j = min(sizes.needed_k, 1024)
    most = ELEMENTS_PER_THREAD * 32 * point["num_warps"]
    block_s = min(_sums(point, sizes), max(min(most, 8192) // block_j, 1))
    several = sizes.features > point["block_f"] * block_s  # steps of a tile
    return {
        **point,
        "block_s": block_s,
        "block_j": block_j,
        "waits": waits_by_rule(sizes.shape.classes) and not tiled and sizes.splits(point) > 1,
        "max_registers": 0,
        "weight_buffers": WEIGHT_BUFFERS if point["block_n"] > 1 and several else 0,
        "max_programs": 0,
    }


def _sums(point: Point, sizes: Sizes) -> int:
    """Return how many partial sums to add up in a step; if tiled, of so many programs that share a tile's features."""
    if point["block_f"] == 1:
        return min(next_power_of_2(sizes.splits(point)), 64)
    shape = sizes.shape
    tiles = -(-shape.samples // point["block_n"]) * -(-shape.classes // point["block_k"])
    steps_along = sizes.features // point["block_f"]
    return 1 << max(min(steps_along, _ENOUGH_TILES // tiles, _MOST_SHARING), 1).bit_length() - 1


#: Tiles that are enough for all multiprocessors, and programs that share the features of one, at most.
_ENOUGH_TILES, _MOST_SHARING = 256, 8
#: Elements of the weight in one step, where a program multiplies what it pooled.
_SPLIT_WEIGHT = 16384
#: Heads of so many classes or fewer were mostly fastest split, with fewer warps than by rule (ResNet-18, H200).
_FEW_CLASSES = 128
#: Programs that pool, of a usual way to tile a head: enough for all multiprocessors.
_ENOUGH_POOLS = 256
#: Windows of at most so many columns are read in steps of so many elements, where channels lie beside each other.
_SMALL_WINDOW, _SMALL_STEP = 64, 512


class _Tiles(NamedTuple):
    """A usual way to tile a head: near the fastest ones of ResNet-18's and -50's with 1,000 classes alone (H200)."""

    block_n: int
    block_f: int
    """At most; there may be fewer features."""
    weight: int
    """Elements of the weight in one step of a tile."""
    block_a: int
    """At most."""
    columns: int
    """Columns of a part of a window, at most."""
    stages: int
    """At most; there may be fewer steps."""
    num_warps: int


#: For one sample and for 16; of these some read ahead.
_TILES = (
    _Tiles(1, 256, 4096, 256, 512, stages=1, num_warps=8),
    _Tiles(16, 128, 8192, 64, 2048, stages=1, num_warps=8),
    _Tiles(16, 128, 8192, 128, 2048, stages=4, num_warps=4),
)
#: Steps of two fields at once, which keep a tile as large as it is.
_EXCHANGES = (("block_c", "block_a"), ("window_parts", "block_a"), ("block_c", "block_k"), ("block_s", "block_j"))
_READING_EXCHANGES = (("block_c", "block_a"), ("block_n", "block_k"), ("block_f", "block_s"), ("block_c", "block_p"))


def neighbours(config: LaunchConfig, shape: HeadShape) -> list[LaunchConfig]:
    """Return the configurations one step away along a field, or two fields the other way round, in a fixed order.

    All multiply in the same way: what is usual of each way is among the candidates of ``spread_out``.
    Where a step leaves more partial sums in a step than there are, or more steps read ahead, the neighbour has fewer.
    One that is excluded for the reason that the configuration itself would be, as the rule's may, is a neighbour.
    """
    if config.by_library:  # only how features are packed could differ
        return []
    allowed = (None, excluded(config, shape))
    sizes, here = Sizes(shape), dataclasses.asdict(config)
    fields = READING if config.reads else {name: values for name, values in FIELDS.items() if name != "block_n"}
    moves: list[dict[str, int]] = []
    for name in fields:
        if name != "block_f" or config.tiled:
            moves += [{name: value} for value in _beside(fields[name], here[name]) if name != "block_f" or value > 1]
    for one, other in _READING_EXCHANGES if config.reads else _EXCHANGES:
        for up, down in ((one, other), (other, one)):
            if here[down] > 1:
                moves.append({up: 2 * here[up], down: here[down] // 2})
    found: list[LaunchConfig] = []
    for move in moves:
        point = {**here, **move}
        if config.in_place:  # a step has whole blocks
            if "block_f" in move:
                point["block_c"] = max(point["block_f"] // point["block_p"], 1)
            point["block_f"] = point["block_c"] * point["block_p"]
        point["stages"] = _stages(sizes, point)
        if point["block_f"] == 1:
            point["block_s"] = min(point["block_s"], next_power_of_2(sizes.splits(point)))
        neighbour = config_of(point)
        if neighbour != config and neighbour not in found and excluded(neighbour, shape) in allowed:
            found.append(neighbour)
    return found


def _stages(sizes: Sizes, point: Point) -> int:
    """Return how many steps a point can read ahead, at most as many as it says."""
    steps_of_part = -(-steps(sizes, point) // point["window_parts"])
    return max(value for value in GRID["stages"] if value <= min(point["stages"], steps_of_part))


def _usual(config: LaunchConfig, shape: HeadShape) -> list[dict[str, int]]:
    """Return what is usual of each way to multiply; of tiles, such as a configuration has come last.

    Split, it pools as the configuration does; if that is split, of few classes, less at once in fewer warps.
    """
    if config.reads:
        config = config_of_split(shape, pooling(shape, only_pools=True))
    sizes, here = Sizes(shape), dataclasses.asdict(config)
    found = []
    if config.tiled:
        block_k = min(_SPLIT_WEIGHT // (config.block_c * config.block_p), sizes.needed_k)
        found.append({**here, "block_n": 1, "block_f": 1, "block_k": block_k})
    elif shape.classes <= _FEW_CLASSES:
        light = {**here, "block_a": max(config.block_a // 2, 1), "num_warps": max(config.num_warps // 2, 1)}
        found.append({**light, "stages": _stages(sizes, light)})
    its_own_last = sorted(_TILES, key=lambda tiles: config.tiled and tiles.block_n == config.block_n)
    found += [{**here, **_tiled(sizes, tiles, config.block_p)} for tiles in its_own_last]
    return [_filled(point, sizes) for point in found]


def _tiled(sizes: Sizes, tiles: _Tiles, block_p: int) -> dict[str, int]:
    """Return how to tile a head: many programs that pool little each, for others that multiply."""
    shape = sizes.shape
    pooled = next_power_of_2(shape.samples * shape.channels // _ENOUGH_POOLS)
    block_c = min(max(pooled, 16 if shape.samples < 16 else 32), sizes.needed_c, MOST_FEATURES // block_p)
    parts = next_power_of_2(-(-sizes.columns // tiles.columns)) if shape.pool == "avg" else 1
    small = sizes.columns <= _SMALL_WINDOW and shape.layout == "channels_last"
    block_a = max(_SMALL_STEP // block_c, 2) if small else tiles.block_a
    several = 2 if shape.samples == 1 else 1  # programs that share the features of the only sample
    block_f = max(min(tiles.block_f, next_power_of_2(sizes.features) // several), 16)
    groups = -(-shape.samples // tiles.block_n)
    least_k = next_power_of_2(-(-groups * shape.classes // MOST_TILES))
    block_k = max(min(max(tiles.weight // block_f, least_k), sizes.needed_k), 16)
    point = {
        "block_n": tiles.block_n,
        "block_c": block_c,
        "block_a": min(block_a, next_power_of_2(-(-sizes.columns // parts))),
        "block_f": max(min(block_f, ELEMENTS_PER_THREAD * 32 * tiles.num_warps // block_k), 16),
        "block_k": block_k,
        "window_parts": parts,
        "stages": tiles.stages,
        "num_warps": tiles.num_warps,
    }
    return {**point, "stages": _stages(sizes, point)}


def _beside(values: tuple[int, ...], value: int) -> list[int]:
    if value not in values:  # of a configuration that is not from here
        return [next_power_of_2(value) // 2, next_power_of_2(value)] if value > 1 else []
    index = values.index(value)
    return [values[other] for other in (index - 1, index + 1) if 0 <= other < len(values)]


@lru_cache(maxsize=64)
def spread_out(shape: HeadShape, count: int) -> tuple[LaunchConfig, ...]:
    """Return up to ``count`` configurations of the grid, always the same ones, as far from each other as can be.

    First what is usual of each way to multiply, then what lies around it and the rule's, at most ``WITHIN`` steps along
    the fields away: farther off hardly anything is fast.
    """
    rule, reading = config_by_rule(shape), readings(shape)
    awaiting = [config_of(point) for point in _usual(rule, shape)]
    usual = [*awaiting, *(config_of_reading(shape, one) for one in dict.fromkeys(one.features for one in reading))]
    centres = [one for one in (rule, *awaiting) if not one.reads]
    around = [*(one for centre in centres for one in grid(shape, near=centre)), *reading]
    around = [one for one in dict.fromkeys(around) if one != rule]
    random.Random(0).shuffle(around)
    # the ways to multiply take turns, that of the rule first
    ways = {way(rule): [], **grouped(around, way)}
    near = [config for turn in zip_longest(*ways.values()) for config in turn if config is not None]
    bits = torch.tensor(
        [[FEATURES.index(one.features), *(getattr(one, name).bit_length() for name in GRID)] for one in near]
    )
    free = torch.full((len(near),), WITHIN)  # steps to the closest that is chosen
    chosen = [near.index(one) for one in dict.fromkeys(usual) if one in near][:count]
    for index in chosen:
        free = torch.minimum(free, _steps_to(index, bits))
    for apart in range(WITHIN, 0, -1):
        after = 0
        while len(chosen) < min(count, len(near)):
            left = (free[after:] >= apart).nonzero()
            if not len(left):
                break
            after += int(left[0])
            chosen.append(after)
            free = torch.minimum(free, _steps_to(after, bits))
    return tuple(near[index] for index in chosen)


def _steps_to(index: int, bits: Tensor) -> Tensor:
    """Count doublings and halvings from every configuration to one; another way to multiply is one step.

    Args:
        index: of the one.
        bits: [configurations, 1 + fields of the grid], where features lie, then bit lengths of the values, of
            ``block_f`` and ``block_n`` first.
    """
    steps_along = (bits - bits[index]).abs()
    tiled = bits[:, 1] > 1
    other = (tiled != tiled[index]) | (steps_along[:, [0, 2]] > 0).any(1)
    return other + torch.where(other, 0, steps_along[:, 1]) + steps_along[:, 3:].sum(1)


def _apart(point: Point, config: LaunchConfig) -> int:
    """Count those steps along the fields that a point has."""
    way = (point["block_f"] > 1, point.get("block_n", config.block_n)) != (config.tiled, config.block_n)
    fields = [name for name in point if name != "block_n" and (name != "block_f" or not way)]
    return way + sum(_steps(point[name], config, name) for name in fields)


def _steps(value: int, config: LaunchConfig, name: str) -> int:
    return abs(value.bit_length() - int(getattr(config, name)).bit_length())
