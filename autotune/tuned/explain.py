"""Explanation of a head's launch: the entry of the tuned table that serves it, or the key that the table lacks."""

import math
from typing import Any, NamedTuple

from ...kernels.head_shape import HeadShape
from ...kernels.kernel_hash import is_measured_code, kernel_hash
from ...kernels.launch_config import LaunchConfig
from ...kernels.launch_rule import config_by_rule
from ...kernels.tuned_table import Entry, TunedTable, table_of, tuned_devices


class Explanation(NamedTuple):
    """The entry of a device's table for one head, or the reason that there is none."""

    device: str
    shape: HeadShape
    place: str
    """One of ``tuned_table.PLACES``."""
    missed: tuple[str, ...]
    """Keys that differ from the nearest entry's, each with what was asked and what the table has; empty if the head has
    an entry of its own."""
    entry: Entry | None
    """The entry that serves the head: its own, or that of another batch size; None: the rule does."""
    config: LaunchConfig

    def lines(self) -> list[str]:
        """Return the explanation in lines for a terminal."""
        lines = [f"{self.shape}, {self.place}, on {self.device}"]
        lines += [f"  not in the table: {reason}" for reason in self.missed]
        if self.entry is None:
            lines.append("  used: the rule's configuration")
        elif self.missed:
            low, high = self.entry.serves
            measured = f"serves batch {low} to {high}: at both it was measured to lose at most 1 % to the winner"
            lines.append(f"  used: the entry of batch {self.entry.shape.samples}, which {measured}")
        else:
            lines.append(f"  used: its own entry, {self.entry.margin:.1%} less time than the rule's configuration")
        fields = " ".join(f"{name}={value}" for name, value in vars(self.config).items())
        return [*lines, f"  {fields}"]


def explain(device_name: str, shape: HeadShape, place: str) -> Explanation:
    """Look up how a head is launched on a device, which need not be there, and explain it.

    The device has the name that ``torch.cuda.get_device_name`` says, or that of its table's file.

    Raises:
        BadTable: the table cannot be read.
    """
    table = table_of(device_name)
    if table is None:
        others = ", ".join(tuned_devices())
        there_are = f"there are tables for {others}" if others else "there is none at all"
        no_table = f"device: no table for {device_name}, {there_are}"
        return Explanation(device_name, shape, place, (no_table,), None, config_by_rule(shape))
    entry = table.find(shape, place)
    missed = () if entry is not None and entry.shape == shape else tuple(_differences(table, shape, place))
    config = config_by_rule(shape) if entry is None else entry.config
    return Explanation(table.device, shape, place, missed, entry, config)


def _differences(table: TunedTable, shape: HeadShape, place: str) -> list[str]:
    """Name the keys in which the nearest entry differs: the one with the fewest, and the nearest sizes."""
    if not is_measured_code(table.kernel):
        return [f"kernel: table tuned for another kernel, {table.kernel}; the one here is {kernel_hash()}"]
    if not table.entries:
        return ["entries: the table has none"]
    asked = _keys(shape, place)
    rows = [_keys(entry.shape, entry.place) for entry in table.entries]
    nearest = min(rows, key=lambda row: _distance(row, asked))
    differing = [name for name in asked if nearest[name] != asked[name]]
    alike = [row for row in rows if all(row[name] == asked[name] for name in asked if name not in differing)]
    has = {name: ", ".join(map(str, sorted({row[name] for row in alike}))) for name in differing}
    if differing == ["samples"]:
        sizes = sorted(entry for entry in table.entries if _keys(entry.shape, entry.place) in alike)
        has["samples"] = ", ".join(map(_size, sizes))
    return [f"{name}: {asked[name]} asked, table has {has[name]}" for name in differing]


def _size(entry: Entry) -> str:
    """Name an entry's batch size and those that it serves besides."""
    samples, (low, high) = entry.shape.samples, entry.serves
    return f"{samples} (serves {low} to {high})" if low < high else str(samples)


def _keys(shape: HeadShape, place: str) -> dict[str, Any]:
    return {**shape._asdict(), "place": place}


def _distance(row: dict[str, Any], asked: dict[str, Any]) -> tuple[int, float]:
    differing = [name for name in asked if row[name] != asked[name]]
    sizes = [name for name in differing if isinstance(asked[name], int)]
    return len(differing), sum(abs(math.log(row[name] / asked[name])) for name in sizes)
