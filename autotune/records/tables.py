"""Tables of records, for the terminal and for Markdown, and those of the benchmark; made without torch, anywhere."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from .console import plain_console
from .record import Record, latest

#: Of the benchmark's tables.
COLUMNS = (
    "exits",
    "variant",
    "host to answer, us",
    "device, us",
    "host / bare",
    "device / bare",
    "host over floor, us",
    "device over floor, us",
    "throughput / floor",
)
#: What the widest tables need on a terminal.
WIDTH = 200
#: Characters of a text that stays on one line.
_UNBROKEN = 60
#: How many of them are text.
_TEXT_COLUMNS = 2


class RecordTable(NamedTuple):
    """What records of one environment say."""

    title: str
    columns: tuple[str, ...]
    text_columns: int
    """How many of them, from the left, are text."""
    rows: list[tuple[str, ...]]
    """A cell a column; those with the same first one belong together."""
    remarks: list[str]
    """What is no number: failures, and what else to know of a row."""


def bench_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return one table for each cell and environment, of the last measurement of each variant.

    Ratios stand only where the bare trunk of the same option was measured in the same run, and so does what compares
    with the floor: of an exit the truncated network, of mixed exits the trunk's segments, each for the open samples.
    Throughput is that of calls back to back, by their device time.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in latest(record for record in records if record.kind == "bench"):
        group = (json.dumps(record.cell, sort_keys=True), record.environment_key)
        groups.setdefault(group, []).append(record)
    return [_table(group) for group in groups.values()]


def _table(records: Sequence[Record]) -> RecordTable:
    cell, environment = records[0].cell, records[0].environment
    shape = "x".join(str(size) for size in cell["input"])
    title = (
        f"{cell['model']} {cell['dtype']}, batch {cell['batch']}, {cell['classes']} classes, {len(cell['taps'])} heads "
        f"({cell['placement']}), {shape}; {environment.get('gpu')}, torch {environment.get('torch')}; "
        "median (20th to 80th percentile)"
    )
    order = {pattern: place for place, pattern in enumerate(["never", *cell["taps"], "own"])}
    ordered = sorted(records, key=lambda record: order.get(record.exits, len(order)))
    rows, remarks = [_row(record) for record in ordered], [line for one in ordered for line in _remarks(one)]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, rows, remarks)


def _row(record: Record) -> tuple[str, ...]:
    pairs = {pair["role"]: pair for pair in record.paired}
    if record.error is not None or record.host_us is None or record.device_us is None:
        return (record.exits, record.variant, "failed", *["-"] * (len(COLUMNS) - 3))
    times = (record.host_us, record.device_us)
    ratios = [f"{pairs['bare'][f'{kind}_ratio']:.3f}" if "bare" in pairs else "-" for kind in ("host", "device")]
    floor = pairs.get("truncated") or pairs.get("segments")
    over = [
        f"{taken['median'] - floor[f'{kind}_us']:+.1f}" if floor else "-"
        for kind, taken in zip(("host", "device"), times, strict=True)
    ]
    throughput = f"{1.0 / floor['device_ratio']:.3f}" if floor else "-"
    return (record.exits, record.variant, *(_spread(taken) for taken in times), *ratios, *over, throughput)


def _spread(taken: dict[str, Any]) -> str:
    return f"{taken['median']:,.1f} ({taken['p20']:,.1f}-{taken['p80']:,.1f})"


def _remarks(record: Record) -> list[str]:
    what = f"{record.variant}, exits {record.exits}"
    if record.error is not None:
        return [f"{what}: {record.error}"]
    counts = record.correctness or {}
    remarks = []
    if counts.get("differing"):
        remarks.append(f"{what}: {counts['differing']} of {counts['samples']} answers differ, all within rounding")
    for pair in record.paired:
        if pair["role"] == "plain":
            ratios = f"{pair['host_ratio']:.3f} to the answer, {pair['device_ratio']:.3f} on the device"
            remarks.append(f"{what}: time over that of {pair['variant']}: {ratios}")
    return remarks


def wide_console() -> Console:
    """Return the terminal as wide as it is; a file or pipe, which has no width, gets room for whole tables."""
    console = plain_console()
    return console if console.is_terminal else plain_console(max(console.width, WIDTH))


def as_rich(table: RecordTable) -> Table:
    """Return the table for a terminal of ``WIDTH`` columns, sections for rows that begin alike, if any do."""
    drawn = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(table.columns):
        heading = name.replace(" / ", "\n/ ").replace(" over ", "\nover ")
        text = place < table.text_columns
        whole = text and all(len(row[place]) <= _UNBROKEN for row in table.rows)
        drawn.add_column(heading, justify="left" if text else "right", no_wrap=whole, overflow="fold")
    sections = len({row[0] for row in table.rows}) < len(table.rows)
    for place, row in enumerate(table.rows):
        follows = place + 1 < len(table.rows) and table.rows[place + 1][0] != row[0]
        drawn.add_row(*row, end_section=sections and follows)
    return drawn


def print_tables(console: Console, tables: Iterable[RecordTable]) -> None:
    """Print tables, each with its remarks below."""
    for one in tables:
        console.print(as_rich(one))
        for remark in one.remarks:
            console.print(remark, soft_wrap=True)


def as_markdown(table: RecordTable) -> str:
    """Return the table in Markdown, its title in bold above and its remarks below."""
    numbers = len(table.columns) - table.text_columns
    lines = [f"**{table.title}**", "", _line(table.columns), _line(["---"] * table.text_columns + ["---:"] * numbers)]
    lines += [_line(row) for row in table.rows]
    if table.remarks:
        lines += ["", *(f"- {remark}" for remark in table.remarks)]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
