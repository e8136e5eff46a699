"""Rules that exclude launch configurations before anything is compiled, and the sizes of a head that they ask for.

A configuration is excluded because the kernel cannot run it, because its tiles do not fit into registers or shared
memory, or because it does the work of another one with something to spare. ``RULES`` holds the rules and their reasons.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...kernels.before_launch import WARPS as PACKING_WARPS
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import MOST_TILES, ROW_UNIT, WEIGHT_BUFFERS, LaunchConfig, next_power_of_2
from ...kernels.launch.tuned_table import config_from

#: Values of each field that the grid tries, in the order of enumeration.
GRID: dict[str, tuple[int, ...]] = {
    "block_f": (1, 16, 32, 64, 128, 256, 512),
    "block_n": (1, 16),
    "block_p": (1, 2, 4, 8, 16, 32, 64),
    "block_c": (4, 8, 16, 32, 64, 128, 256, 512),
    "window_parts": (1, 2, 4, 8, 16, 32, 64),
    "block_a": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    "stages": (1, 2, 4),
    "block_k": (16, 32, 64, 128, 256, 512, 1024, 2048),
    "num_warps": (1, 2, 4, 8, 16),
}
#: The other fields: in the grid they follow from the rest, and ``neighbours`` steps along these values. Of the classes
#: of the softmax and the partial sums in one step all are tried that fit.
FURTHER: dict[str, tuple[int, ...]] = {
    "block_s": (1, 2, 4, 8, 16, 32, 64),
    "block_j": tuple(1 << bits for bits in range(12)),
    "waits": (False, True),
    "max_registers": (0, 128, 96, 64, 48, 32),
    "weight_buffers": (0, WEIGHT_BUFFERS),
}
FIELDS = {**GRID, **FURTHER}
#: What is tried of heads whose features lie in memory before they are multiplied; how packed ones are pooled, in a
#: launch of their own, say the first four.
READING: dict[str, tuple[int, ...]] = {
    **{name: GRID[name] for name in ("block_c", "block_p", "block_a", "stages")},
    "block_n": (8, 16, 32, 64, 128),
    "block_k": (16, 32, 64, 128, 256),
    "block_f": (16, 32, 64, 128, 256, 512),
    "block_s": (*FURTHER["block_s"], 128),
    "block_j": FURTHER["block_j"],
    "num_warps": (2, 4, 8),
    "weight_buffers": (1, 2, 3, 4, 5),
}

#: Elements of a tile that a thread may hold: with float32 accumulators they take half of its 255 registers.
ELEMENTS_PER_THREAD = 128
#: Bytes of shared memory of a program on compute capability 9.0.
SHARED_BYTES = 227 * 1024
#: Features that a program pools at most; more leave too few programs.
MOST_FEATURES = 512
#: Partial sums of a sample at most.
MOST_SPLITS = 512
#: Steps along the classes, of the product or the softmax, at most.
MOST_STEPS = 16
#: Steps along the features at most.
MOST_FEATURE_STEPS = 32
#: Samples that a group of 16 should have at least: of fewer, a program each is faster.
LEAST_SAMPLES = 4
#: Programs that keep the memory busy, whatever each of them reads.
ENOUGH_PROGRAMS = 16
#: Bytes of the map that a program may read where there are fewer.
MOST_BYTES = 64 * 1024
#: Bytes that are read from memory together.
_SECTOR = 32


class Sizes:
    """Sizes of a head that the rules ask for."""

    def __init__(self, shape: HeadShape) -> None:
        """Compute them from the shape."""
        self.shape = shape
        self.view = shape.view
        self.positions = self.view.positions
        """Windows of a channel."""
        self.features = shape.channels * self.positions
        self.rows = self.view.window_h if self.positions == 1 else 1
        """Rows of the tallest window; those of a grid are read element after element, as if of one row."""
        self.columns = self.view.window_w * self.view.window_h // self.rows
        """Columns of the widest window."""
        self.needed_c = next_power_of_2(shape.channels)
        """The least power of two that holds all channels."""
        self.needed_k = next_power_of_2(shape.classes)
        """The least power of two that holds all classes."""
        self.element_size = shape.element_size
        """Bytes of an element of x and weight."""

    def splits(self, point: Mapping[str, int]) -> int:
        """Programs that pool one sample."""
        blocks = -(-self.shape.channels // point["block_c"]) * -(-self.positions // point["block_p"])
        return blocks * point["window_parts"]


Point = Mapping[str, int]


def config_of(point: Point) -> LaunchConfig:
    """Return the configuration that a point with all fields stands for."""
    values: dict[str, Any] = {**point, "waits": bool(point["waits"])}
    return LaunchConfig(**values)


def _features(p: Point) -> int:
    return p["block_c"] * p["block_p"]


def steps(s: Sizes, p: Point) -> int:
    """Steps along a window's row."""
    return -(-s.columns // p["block_a"])


def _pool_tile(p: Point) -> int:
    return _features(p) * p["block_a"]


def _too_many_tiles(s: Sizes, p: Point) -> bool:
    tiles = -(-s.shape.samples // p["block_n"]) * -(-s.shape.classes // p["block_k"])
    return p["block_f"] > 1 and tiles * p.get("block_s", 1) > MOST_TILES


def _most_sums(s: Sizes, p: Point) -> int:
    """Partial sums of a logit: one of each step along the features if tiled, of each program that pools if split."""
    return s.splits(p) if p["block_f"] == 1 else -(-s.features // p["block_f"])


def _tiles(p: Point) -> list[int]:
    weight = p["block_k"] * (p["block_f"] if p["block_f"] > 1 else _features(p))
    tiles = [_pool_tile(p), weight]
    if p["block_f"] > 1:  # what is read of the features in one step, and the sums
        read = p["block_n"] if p["block_n"] > 1 else p["window_parts"]
        tiles += [read * p["block_f"], p["block_n"] * p["block_k"]]
    return [*tiles, p["block_s"] * p["block_j"]] if "block_s" in p and "block_j" in p else tiles


def _reads_alone(s: Sizes, p: Point) -> bool:
    """Return True if few programs read much, though there could be more."""
    map_bytes = _features(p) * s.columns * s.rows * s.element_size // p["window_parts"]
    could_be_more = s.shape.pool == "avg" or s.splits(p) < s.shape.channels
    return could_be_more and s.shape.samples * s.splits(p) < ENOUGH_PROGRAMS and map_bytes > MOST_BYTES


def _per_thread(p: Point) -> float:
    return max(_tiles(p)) / (32 * p["num_warps"])


def _shared_bytes(s: Sizes, p: Point) -> int:
    """An upper bound of what the steps that are under way at once take, and of what is exchanged between warps."""
    pool = (p["stages"] if p["stages"] > 1 else 0) * _pool_tile(p) * s.element_size
    product = 0
    if p["block_f"] > 1:
        blocks = 1  # of features, which are handed to the product
        if p["block_n"] > 1 and p["window_parts"] == 4:
            blocks += 4  # Triton reads two steps of the last two parts ahead, too, as it may the weight
        product = (WEIGHT_BUFFERS * p["block_k"] * s.element_size + blocks * p["block_n"] * 4) * p["block_f"]
    return max(pool, product, 4 * p["num_warps"] * max(_features(p), p["block_j"]))


#: By the field with whose value they can be applied, reasons and what they exclude. Fields are in the order of
#: ``FIELDS``, and a point is excluded for the first reason that applies.
RULES: dict[str, dict[str, Callable[[Sizes, Point], bool]]] = {
    "block_f": {
        "more features a step than there are": lambda s, p: p["block_f"] > max(next_power_of_2(s.features), 16),
        "many steps along the features": lambda s, p: (
            1 < p["block_f"] and MOST_FEATURE_STEPS * p["block_f"] < min(s.features, 8192)
        ),
    },
    "block_n": {
        "groups of samples want tiles": lambda s, p: p["block_n"] > 1 and p["block_f"] == 1,
        "groups mostly without samples": lambda s, p: p["block_n"] > 1 and s.shape.samples < LEAST_SAMPLES,
    },
    "block_p": {"more positions than there are": lambda s, p: p["block_p"] > next_power_of_2(s.positions)},
    "block_c": {
        "more channels than there are": lambda s, p: p["block_c"] > s.needed_c,
        "more features than a program should pool": lambda s, p: _features(p) > MOST_FEATURES,
        "channels that are less than a sector": lambda s, p: (
            s.shape.layout == "channels_last" and p["block_c"] < min(s.needed_c, _SECTOR // (2 * s.element_size))
        ),
    },
    "window_parts": {
        "a maximum does not add up": lambda s, p: p["window_parts"] > 1 and s.shape.pool == "max",
        "more partial sums than a sample should have": lambda s, p: s.splits(p) > MOST_SPLITS,
        "few programs for what they read": _reads_alone,
    },
    "block_a": {
        "more columns than a window has": lambda s, p: p["block_a"] > next_power_of_2(s.columns),
        "more parts than a window has steps": lambda s, p: p["window_parts"] > steps(s, p),
        "columns that are less than a sector": lambda s, p: (
            s.shape.layout == "contiguous"
            and p["block_a"] < min(next_power_of_2(s.columns), _SECTOR // (2 * s.element_size))
        ),
    },
    "stages": {
        "reads ahead of more steps than there are": lambda s, p: (
            p["stages"] > 1 and p["stages"] > -(-steps(s, p) // p["window_parts"])
        ),
    },
    "block_k": {
        "fewer classes a tile than rows are padded to": lambda s, p: p["block_f"] > 1 and p["block_k"] < ROW_UNIT,
        "more classes a step than there are": lambda s, p: p["block_k"] > max(s.needed_k, 16),
        "more classes a tile than tl.dot should take": lambda s, p: p["block_n"] > 1 and p["block_k"] > 256,
        "more tiles than a GPU has room for": _too_many_tiles,
        "a product of many steps": lambda s, p: p["block_f"] == 1 and MOST_STEPS * p["block_k"] < s.needed_k,
    },
    "num_warps": {
        "more registers than a thread has": lambda s, p: _per_thread(p) > ELEMENTS_PER_THREAD,
        "more threads than elements": lambda s, p: _per_thread(p) < 1 and p["num_warps"] > 1,
    },
    "block_s": {
        "more partial sums a step than there are": lambda s, p: p["block_s"] > next_power_of_2(_most_sums(s, p)),
        "more tiles than a GPU has room for": _too_many_tiles,
    },
    "block_j": {
        "more classes of the softmax than there are": lambda s, p: p["block_j"] > s.needed_k,
        "a softmax of many steps": lambda s, p: MOST_STEPS * p["block_j"] < min(s.needed_k, 8192),
        "more registers than a thread has": lambda s, p: _per_thread(p) > ELEMENTS_PER_THREAD,
        "more shared memory than there is": lambda s, p: _shared_bytes(s, p) > SHARED_BYTES,
    },
    "weight_buffers": {
        "buffers that nothing is read into": lambda s, p: (
            p["weight_buffers"] == 1 or (p["weight_buffers"] > 0 and p["block_n"] == 1)
        ),
    },
    "waits": {"nobody to wait for": lambda s, p: bool(p["waits"]) and (p["block_f"] > 1 or s.splits(p) == 1)},
    "max_registers": {
        "registers that the tiles do not fit into": lambda s, p: 0 < p["max_registers"] < 2 * _per_thread(p),
        "more registers than a multiprocessor has for a thread": lambda s, p: (
            p["max_registers"] * 32 * p["num_warps"] > 65_536
        ),
    },
}


#: The same of heads whose features lie in memory, beside what no table may hold.
READING_RULES: dict[str, Callable[[Sizes, Point], bool]] = {
    "groups mostly without samples": lambda s, p: p["block_n"] > max(next_power_of_2(s.shape.samples), 8),
    "more classes a tile than there are": lambda s, p: p["block_k"] > max(s.needed_k, 16),
    "more features a step than there are": lambda s, p: p["block_f"] > max(next_power_of_2(s.features), 256),
    "more partial sums than there are steps": lambda s, p: p["block_s"] > max(s.features // p["block_f"], 1),
    "more tiles than a GPU has room for": _too_many_tiles,
    "more classes of the softmax than there are": lambda s, p: p["block_j"] > s.needed_k,
    "a softmax of many steps": lambda s, p: MOST_STEPS * p["block_j"] < min(s.needed_k, 8192),
    "more registers than a thread has": lambda s, p: (
        p["block_n"] * p["block_k"] > ELEMENTS_PER_THREAD * 32 * p["num_warps"]
        or _pool_tile(p) > ELEMENTS_PER_THREAD * 32 * PACKING_WARPS
    ),
    "more channels than there are": lambda s, p: p["features"] == "packed" and p["block_c"] > s.needed_c,
    "more columns than a window has": lambda s, p: p["block_a"] > next_power_of_2(s.columns),
    "reads ahead of more steps than there are": lambda s, p: p["stages"] > max(steps(s, p), 1),
    "more shared memory than there is": lambda s, p: (
        p["weight_buffers"] * p["block_f"] * (p["block_n"] + p["block_k"]) * s.element_size > SHARED_BYTES
    ),
}


def excluded(config: LaunchConfig, shape: HeadShape) -> str | None:
    """Return why a configuration is not worth compiling for a head, or None."""
    sizes, point = Sizes(shape), dataclasses.asdict(config)
    if not (config.reads or config.by_library):
        return reason_among(sizes, point, {}, FIELDS)
    try:
        config_from(point, shape)
    except ValueError as error:
        return str(error)
    if config.by_library:
        return None
    return next((reason for reason, breaks in READING_RULES.items() if breaks(sizes, point)), None)


def reason_among(sizes: Sizes, point: Point, known: dict[str, int], names: Iterable[str]) -> str | None:
    """Return why a point is excluded by the rules of further fields, whose values are taken into ``known``."""
    for name in names:  # a rule may ask whether a field is there yet
        known[name] = point[name]
        for reason, breaks in RULES[name].items():
            if breaks(sizes, known):
                return reason
    return None
