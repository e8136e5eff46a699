"""Tables that ``auxhead-tune profile`` prints from its two records."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from ...model.own_exits.silenced_model import TakenExit
from ..records.record import Record

_COLUMNS = ("before", "after")


def print_comparison(console: Console, records: Sequence[Record]) -> None:
    """Print the tables of requests and API calls of one run, and the checks."""
    console.print(requests_table(records))
    console.print(_api_table(records))
    for line in _checks(records):
        console.print(line, soft_wrap=True)


def exits_table(exits: Sequence[TakenExit]) -> Table:
    """Return the table of the exits that were found in a model, in the order in which they run."""
    columns = ("exit", "returned at", "head", "tap", "pool", "classes")
    table = Table(*columns, title="Exits of the model, and the layers that feed them")
    for index, one in enumerate(exits):
        pool = ", ".join(filter(None, (one.pool, one.how)))
        table.add_row(str(index), str(one.place), one.head, one.tap, pool, str(one.classes))
    return table


def requests_table(records: Sequence[Record]) -> Table:
    """Return the table of times and counts of one request, before and after."""
    measured = [record.measured or {} for record in records]
    table = Table(Column("one request", no_wrap=True), "unit", *(Column(name, justify="right") for name in _COLUMNS))
    table.title = "Host times: median (p20-p80), no profiler; the rest: means under it"

    def row(name: str, unit: str, values: Iterable[str]) -> None:
        table.add_row(name, unit, *values)

    row("host, until the answer is there", "us", (_spread(record.host_us or {}) for record in records))
    row("host, until the call returns", "us", (_spread(one["call_us"]) for one in measured))
    row("device, sum of kernel times", "us", (f"{one['kernel_us']:,.1f}" for one in measured))
    row("device, busy (union of kernels)", "us", (f"{one['busy_us']:,.1f}" for one in measured))
    table.add_section()
    row("launches by the host", "calls", (_count(one["launches"]) for one in measured))
    row("  CUDA graphs among them", "calls", (_count(one["graph_launches"]) for one in measured))
    row("kernels that ran", "kernels", (_count(one["kernels"]) for one in measured))
    row("copies that ran", "copies", (_count(one["copies"]) for one in measured))
    row("memsets that ran", "memsets", (_count(one["memsets"]) for one in measured))
    table.add_section()
    requests = records[0].protocol["requests"]
    row(f"allocations, {requests} requests", "calls", (f"{one['allocations']:,}" for one in measured))
    row(f"waits, {requests} requests", "calls", (f"{one['waits']:,}" for one in measured))
    return table


def _api_table(records: Sequence[Record]) -> Table:
    headings = [f"{name},\n{unit}" for name in _COLUMNS for unit in ("calls", "host us")]
    columns = [Column("CUDA API, one request", no_wrap=True), *(Column(text, justify="right") for text in headings)]
    table = Table(*columns, title="CUDA API calls, under the profiler, which adds to their time")
    rows = [{row["name"]: row for row in (record.measured or {})["api"]} for record in records]
    for name in dict.fromkeys([*rows[0], *rows[1]]):
        table.add_row(name, *(text for side in rows for text in _cells([side[name]] if name in side else [])))
    table.add_section()
    table.add_row("all", *(text for side in rows for text in _cells(list(side.values()))))
    return table


def _cells(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Return calls and host time of one side of a row."""
    if not rows:
        return "-", "-"
    return _count(sum(row["calls"] for row in rows)), f"{sum(row['host_us'] for row in rows):,.1f}"


def _checks(records: Sequence[Record]) -> list[str]:
    samples = records[0].protocol["samples_by_exit"]
    batch = sum(samples.values())
    lines = ["Samples by exit: " + ", ".join(f"{name} {count}" for name, count in samples.items()) + "."]
    for name, record in zip(_COLUMNS, records, strict=True):
        counts = record.correctness or {}
        line = f"Label and exit as from the eager runner, {name}: {batch - counts['differing']} of {batch} samples"
        near = counts["differing_near"]
        close = f"; {near} within rounding of a threshold or a second label" if near else ""
        lines.append(line + close + ".")
    if records[1].notes:
        lines.append("After is not in a steady state:")
        lines += [f"  {problem}" for problem in records[1].notes]
    else:
        lines.append(
            "After is in a steady state: no CUDA call that allocates, frees or waits for the device, "
            "and as many launches in each request."
        )
    return lines


def _spread(us: dict[str, Any]) -> str:
    return f"{us['median']:,.0f}\n({us['p20']:,.0f}-{us['p80']:,.0f})"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.2f}"
