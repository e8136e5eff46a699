"""Explanation of a head's launch: the entry of the tuned table that serves it, or the key that the table lacks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ...kernels.launch.check_arguments import check_countable, check_input, check_pool
from ...kernels.launch.choose_config import chosen_by_rule, name_of
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.head_view import head_view
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import config_beside_trunk
from ...kernels.launch.tuned_table import Entry, TunedTable, table_path, tables_for, tuned_devices
from ...model.basics.bad_input import BadInput
from ..records.tables import wide_console


class Explanation(NamedTuple):
    """The entry of a device's table for one head, or the reason that there is none."""

    device: str
    shape: HeadShape
    unused: tuple[str, ...]
    """Tables that the device would go by but for this."""
    missed: tuple[str, ...]
    """Keys that differ from the nearest entry's, each with what was asked and what the table has; empty if the head has
    an entry of its own."""
    entry: Entry | None
    """The entry that serves the head: its own, or that of another batch size; None: the rule does."""
    owner: str | None
    """The device whose table has the entry, or the nearest one; None: there is no table."""
    config: LaunchConfig
    """By ``fused_head``; in a network ``config_beside_trunk`` of it."""

    def lines(self) -> list[str]:
        """Return the explanation in lines for a terminal."""
        lines = [f"{self.shape}, on {self.device}"]
        lines += [f"  not used: {reason}" for reason in self.unused]
        lines += [f"  not in the table: {reason}" for reason in self.missed]
        if self.entry is None:
            lines.append("  used: the rule's configuration")
        elif self.missed:
            low, high = self.entry.serves
            measured = f"serves batch {low} to {high}: at both it was measured to lose at most 1 % to the winner"
            lines.append(f"  used: the entry of batch {self.entry.shape.samples}, which {measured}")
        else:
            of_then = f"{self.entry.margin:.1%} less time on {self.owner} than what the rule said when it was measured"
            lines.append(f"  used: its own entry, {of_then}")
        packing = "one launch " + ("puts the map in order" if self.shape.view.unpooled else "pools")
        if self.config.by_library:
            packs = "" if self.shape.view.in_weight_order else f"{packing}, "
            multiply = "PyTorch's operations multiply, and one launch decides by the logits"
            return [*lines, f"  way: library: {packs}{multiply}"]
        beside = config_beside_trunk(self.shape, self.config)
        launched = {"way": self.config} | ({"in a network": beside} if beside != self.config else {})
        for where, config in launched.items():
            two = f": {packing}, and another one multiplies and decides" * config.packs
            fields = " ".join(f"{name}={value}" for name, value in vars(config).items())
            lines += [f"  {where}: {config.way}{two}", f"  {fields}"]
        return lines


def explain(device_name: str, shape: HeadShape) -> Explanation:
    """Look up how a head is launched on a device, which need not be there, and explain it.

    The device has the name that ``torch.cuda.get_device_name`` says, or that of its table's file.
    """
    tables, unused = tables_for(device_name)
    if not tables:
        others = ", ".join(tuned_devices())
        there_are = f"there are tables for {others}" if others else "there is none at all"
        no_table = f"device: no table for {device_name}, {there_are}; `auxhead-tune everything` makes one there"
        return Explanation(
            device_name, shape, tuple(unused), () if unused else (no_table,), None, None, chosen_by_rule(shape)
        )
    serving = [one for one in tables if one.find(shape) is not None]  # a launch goes by the first
    table = serving[0] if serving else min(tables, key=lambda one: _nearest(one, shape))
    entry = table.find(shape)
    missed = () if entry is not None and entry.shape == shape else tuple(_differences(table, shape))
    config = chosen_by_rule(shape) if entry is None else entry.config
    borrows = table_path(table.device) != table_path(device_name)
    device = f"{device_name}, which borrows the table of {table.device}" if borrows else table.device
    return Explanation(device, shape, tuple(unused), missed, entry, table.device, config)


def _nearest(table: TunedTable, shape: HeadShape) -> tuple[float, float]:
    """Return how far a table's nearest entry is from a head."""
    asked = shape._asdict()
    return min((_distance(one.shape._asdict(), asked) for one in table.entries), default=(math.inf, math.inf))


def _differences(table: TunedTable, shape: HeadShape) -> list[str]:
    """Name the keys in which the nearest entry differs: the one with the fewest, and the nearest sizes."""
    if not table.entries:
        return ["entries: the table has none"]
    asked = shape._asdict()
    rows = [entry.shape._asdict() for entry in table.entries]
    nearest = min(rows, key=lambda row: _distance(row, asked))
    differing = [name for name in asked if nearest[name] != asked[name]]
    alike = [row for row in rows if all(row[name] == asked[name] for name in asked if name not in differing)]
    has = {name: ", ".join(map(str, sorted({row[name] for row in alike}))) for name in differing}
    if differing == ["samples"]:
        sizes = sorted(entry for entry in table.entries if entry.shape._asdict() in alike)
        has["samples"] = ", ".join(map(_size, sizes))
    return [f"{name}: {asked[name]} asked, table has {has[name]}" for name in differing]


def _size(entry: Entry) -> str:
    """Name an entry's batch size and those that it serves besides."""
    samples, (low, high) = entry.shape.samples, entry.serves
    return f"{samples} (serves {low} to {high})" if low < high else str(samples)


def _distance(row: dict[str, Any], asked: dict[str, Any]) -> tuple[int, float]:
    """Return how many keys differ, another batch size not counted, whose entry may serve; then how far sizes do."""
    differing = [name for name in asked if row[name] != asked[name]]
    sizes = [name for name in differing if isinstance(asked[name], int)]
    return len({*differing} - {"samples"}), sum(abs(math.log(row[name] / asked[name])) for name in sizes)


def run_explain(
    shapes: Sequence[tuple[int, ...]],
    classes: int,
    dtype: str,
    layout: str,
    pool: str,
    windows: tuple[int, ...],
    device: str | None,
) -> None:
    """Print how heads of inputs of these shapes are launched on a device; None: the one here.

    Raises:
        BadInput: no CUDA device here, or an input that no head reads.
    """
    heads = [_head(one, classes, dtype, layout, pool, windows) for one in shapes]
    here = _device_here() if device is None else device
    printed = wide_console()
    for sizes, head in zip(shapes, heads, strict=True):
        if pool in ("none", "first"):  # of which nothing is left in the sizes that the kernel reads
            printed.print(f"{'x'.join(map(str, sizes[1:]))}, pool {pool}, is read as", soft_wrap=True)
        for line in explain(here, head).lines():
            printed.print(line, soft_wrap=True)


def _head(sizes: tuple[int, ...], classes: int, dtype: str, layout: str, pool: str, grid: tuple[int, ...]) -> HeadShape:
    """Return what the kernel would make of an input."""
    step = 2 if layout == "strided" else 1
    try:
        x = torch.empty((*sizes[:-1], sizes[-1] * step), dtype=getattr(torch, dtype), device="meta")[..., ::step]
        if layout == "channels_last" and x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        window_grid = check_pool(pool, grid if len(grid) > 1 else grid[0])
        check_countable(x, check_input(x, pool, window_grid))
    except (ValueError, RuntimeError) as error:  # the last of more elements than 64 bits count
        raise BadInput(str(error).partition("\n")[0]) from None
    view = head_view(tuple(x.shape), x.stride(), pool, window_grid)
    return HeadShape.of(view, classes, pool_max=pool == "max", dtype=x.dtype)


def _device_here() -> str:
    if not torch.cuda.is_available():
        known = ", ".join(tuned_devices()) or "no device yet"
        raise BadInput(f"--device: torch sees no CUDA device here, wants a name; there are tables for {known}")
    return name_of(torch.device("cuda", torch.cuda.current_device()))
