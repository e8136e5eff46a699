"""Tables of heads alone: of a network a line a shape, of random ones a line a kind, and the worst; without torch."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..records.heads import KINDS, RANDOM, Measured, Ratio, finding, head_in_words, last_runs, ratio_to, summary_of
from ..records.record import Record, grouped
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
#: Columns of the table of random heads by kind, and of that of the worst.
_BY_KIND = (
    "kind", "heads", "by a library", "as fast as eager", "surely slower", "eager / fused, median", "worst",
    "fused over bytes, median", "as fast as compiled", "compiled / fused, median", "worst compiled", "failed",
)  # fmt: skip
_WORST = (
    "number", "kind", "head", "way", "fused, us", "other way, us", "its bytes, us", "eager, us", "eager / fused",
    "compiled / fused",
)  # fmt: skip
#: Heads in the table of the worst.
_MOST_WORST = 15


def head_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return one table for each network, dtype, layout, pool, kind of heads and environment.

    A row has the last run in which the fused head was timed: ratios are those of one run, with their 99 % intervals.
    """

    def table_of(measured: Measured) -> tuple[Any, ...]:
        kind = (_cell(measured).get(name) for name in ("model", "dtype", "layout", "pool", "heads"))
        return (*kind, _first(measured).environment_key)

    return [_table(heads) for heads in grouped(last_runs(records), table_of).values()]


def _table(heads: list[Measured]) -> RecordTable:
    cell, environment = _cell(heads[0]), _first(heads[0]).environment
    kind = f"{cell['heads']} heads" if "heads" in cell else "heads"
    title = (
        f"{kind.capitalize()} of {cell['model']} alone, {cell['dtype']}, {cell['layout']}, {cell['pool']}; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}; "
        "device time: median (20th to 80th percentile), ratio (99 % interval)"
    )
    ordered = sorted(heads, key=lambda measured: (_cell(measured)["classes"], _cell(measured)["samples"]))
    failed = [_remark(record) for measured in ordered for record in measured.values() if record.error is not None]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, [_row(measured) for measured in ordered], failed)


def _first(measured: Measured) -> Record:
    return next(iter(measured.values()))


def _cell(measured: Measured) -> dict[str, Any]:
    return _first(measured).cell


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
    found = ratio_to(measured, variant)
    return "-" if found is None else f"{found.ratio:.2f} ({found.low:.2f}-{found.high:.2f})"


def random_head_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return for each environment a table of the random heads that gain least, and one of all by kind."""
    environments = grouped(last_runs(records, RANDOM), lambda measured: _first(measured).environment_key)
    return [table for heads in environments.values() for table in (_worst(heads), _by_kind(heads))]


def _by_kind(heads: list[Measured]) -> RecordTable:
    kinds = [(kind, [one for one in heads if _cell(one)["kind"] == kind]) for kind in KINDS]
    rows = [_row_of_kind(kind, found) for kind, found in [*kinds, ("all", heads)] if found]
    environment = _first(heads[0]).environment
    title = f"{len(heads):,} random heads by kind; {environment.get('gpu')}, torch {environment.get('torch')}"
    failed = [
        f"FAILED: number {_cell(one)['number']} of seed {_cell(one)['seed']}, {head_in_words(_cell(one))}: "
        f"{record.variant}: {record.error}"
        for one in heads
        for record in one.values()
        if record.error is not None and not record.error.startswith("no baseline")
    ]
    return RecordTable(title, _BY_KIND, 1, rows, [*failed, f"{finding(heads)}."])


def _row_of_kind(kind: str, heads: list[Measured]) -> tuple[str, ...]:
    eager, compiled = (_ratios(heads, peer) for peer in ("eager", "compiled"))
    over_bytes = [
        one["fused"].device_us["median"] / one["bytes"].device_us["median"]
        for one in heads
        if "bytes" in one and one["fused"].device_us and one["bytes"].device_us
    ]
    failed = sum(one["fused"].error is not None for one in heads)
    bytes_taken = f"{statistics.median(over_bytes):.1f}" if over_bytes else "-"
    numbers = (*_summarised(eager, surely=True), bytes_taken, *_summarised(compiled))
    by_library = sum(_way(one) == "library" for one in heads)
    return kind, f"{len(heads):,}", f"{by_library}", *numbers, f"{failed}" if failed else ""


def _ratios(heads: Sequence[Measured], peer: str) -> list[Ratio]:
    return [ratio for one in heads if (ratio := ratio_to(one, peer)) is not None]


def _summarised(ratios: list[Ratio], surely: bool = False) -> tuple[str, ...]:
    if not ratios:
        return ("-",) * (4 if surely else 3)
    found = summary_of(ratios)
    slower = [f"{found.surely_slower}"] if surely else []
    share = f"{found.as_fast} of {found.heads}, {found.as_fast / found.heads:.1%}"
    return share, *slower, f"{found.median:.2f}", f"{found.worst:.2f}"


def _worst(heads: list[Measured]) -> RecordTable:
    found = [(ratio.ratio, one) for one in heads if (ratio := ratio_to(one, "eager")) is not None]
    rows = [_row_of_worst(one) for _, one in sorted(found, key=lambda pair: pair[0])[:_MOST_WORST]]
    return RecordTable(f"The {len(rows)} random heads that gain least", _WORST, 4, rows, [])


def _way(measured: Measured) -> str:
    """Name the way of a fused head as ``LaunchConfig.way`` does."""
    config = measured["fused"].protocol["config"]
    features = config.get("features", "awaited")
    if features == "awaited":
        return "tiled" if config["block_f"] > 1 else "split"
    return "library" if features == "library" else f"read, {features}"


def _row_of_worst(measured: Measured) -> tuple[str, ...]:
    cell = _cell(measured)
    us = (_us(measured, variant) for variant in ("fused", "other way", "bytes", "eager"))
    ratios = (_ratio(measured, peer) for peer in ("eager", "compiled"))
    return f"{cell['number']}", cell["kind"], head_in_words(cell), _way(measured), *us, *ratios
