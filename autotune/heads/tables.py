"""Tables of heads alone, a line a shape: fused, its bytes, and what it replaces; made without torch, anywhere."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ..records.record import Record
from ..records.tables import RecordTable

#: Columns of every table. Where a peer took k times as long as the fused head, that is k times faster.
COLUMNS = (
    "classes",
    "batch",
    "head of",
    "its input",
    "fused, us",
    "its bytes, us",
    "eager, us",
    "eager / fused",
    "compiled, us",
    "compiled / fused",
)
_TEXT_COLUMNS = 4

#: Records of one shape that was measured in the same rounds, by variant.
Measured = Mapping[str, Record]


def head_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return one table for each network, dtype, layout, pool, kind of heads and environment.

    A row has the last run in which the fused head was timed: ratios are those of one run, with their 99 % intervals.
    """
    tables: dict[tuple[Any, ...], list[Measured]] = {}
    for measured in last_runs(records):
        record = next(iter(measured.values()))
        kind = tuple(record.cell.get(name) for name in ("model", "dtype", "layout", "pool", "heads"))
        tables.setdefault((kind, record.environment_key), []).append(measured)
    return [_table(heads) for heads in tables.values()]


def last_runs(records: Iterable[Record]) -> list[Measured]:
    """Return of each head in each environment the last run in which it was timed, else the last one."""
    runs: dict[tuple[Any, ...], dict[str, dict[str, Record]]] = {}
    for record in records:
        if record.kind == "heads":
            thing = (json.dumps(record.cell, sort_keys=True), record.environment_key)
            runs.setdefault(thing, {}).setdefault(record.run, {})[record.variant] = record
    chosen: list[Measured] = []
    for of_head in runs.values():
        timed = [run for run in of_head.values() if "fused" in run and run["fused"].error is None]
        chosen.append((timed or list(of_head.values()))[-1])
    return chosen


def _table(heads: list[Measured]) -> RecordTable:
    first = next(iter(heads[0].values()))
    cell, environment = first.cell, first.environment
    kind = f"{cell['heads']} heads" if "heads" in cell else "heads"
    title = (
        f"{kind.capitalize()} of {cell['model']} alone, {cell['dtype']}, {cell['layout']}, {cell['pool']}; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}; "
        "device time: median (20th to 80th percentile), ratio (99 % interval)"
    )
    ordered = sorted(heads, key=lambda measured: (_cell(measured)["classes"], _cell(measured)["samples"]))
    failed = [_remark(record) for measured in ordered for record in measured.values() if record.error is not None]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, [_row(measured) for measured in ordered], failed)


def _cell(measured: Measured) -> dict[str, Any]:
    return next(iter(measured.values())).cell


def _remark(record: Record) -> str:
    cell = record.cell
    return f"{cell['tap']}, batch {cell['samples']}, {cell['classes']:,} classes: {record.variant}: {record.error}"


def _row(measured: Measured) -> tuple[str, ...]:
    cell = _cell(measured)
    windows = "" if cell["grid_h"] == cell["grid_w"] == 1 else f" in {cell['grid_h']}x{cell['grid_w']} windows"
    size = f"{cell['channels']}x{cell['height']}x{cell['width']}{windows}"
    peers = [text for variant in ("eager", "compiled") for text in (_us(measured, variant), _ratio(measured, variant))]
    head = (f"{cell['classes']:,}", f"{cell['samples']}", cell["tap"], size)
    return (*head, _us(measured, "fused", spread=True), _us(measured, "bytes"), *peers)


def _us(measured: Measured, variant: str, spread: bool = False) -> str:
    taken = measured[variant].device_us if variant in measured else None
    if taken is None:
        return "failed" if variant in measured else "-"
    around = f" ({taken['p20']:,.2f}-{taken['p80']:,.2f})" if spread else ""
    return f"{taken['median']:,.2f}{around}"


def _ratio(measured: Measured, variant: str) -> str:
    if variant not in measured or not measured[variant].paired:
        return "-"
    (pair,) = measured[variant].paired
    return f"{pair['device_ratio']:.2f} ({pair['low']:.2f}-{pair['high']:.2f})"
