"""Tables of records, for the terminal and for Markdown; and the command ``auxhead-tune table``, which prints them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ...model.basics.garbage import no_garbage_collection
from ...model.commands.console import activity, plain_console
from ...model.commands.errors import one_line_errors
from .record import BadRecord, Record, grouped, latest, made_of, read_records

#: Columns of a terminal that the widest tables need.
WIDTH = 200
#: Cells of a text column are not broken into lines if all have at most so many characters.
_UNBROKEN = 60


class RecordTable(NamedTuple):
    """A table as text, before it is drawn for a terminal or written in Markdown."""

    title: str
    columns: tuple[str, ...]
    text_columns: int
    """Number of columns, from the left, that are text."""
    rows: list[tuple[str, ...]]
    """One cell a column; rows with the same first cell are drawn as one section."""
    remarks: list[str]
    """Lines below the table: failures, and notes on rows."""


def wide_console() -> Console:
    """Return a console on standard output: as wide as the terminal, in a file or pipe wide enough for all tables."""
    console = plain_console()
    return console if console.is_terminal else plain_console(max(console.width, WIDTH))


def as_rich(table: RecordTable) -> Table:
    """Return the table for a terminal of ``WIDTH`` columns, with sections if any rows begin alike."""
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


def percentiles_in_words(taken: Mapping[str, Any]) -> str:
    """Write a median with the 20th and 80th percentile, as records hold them."""
    return f"{taken['median']:,.1f} ({taken['p20']:,.1f}-{taken['p80']:,.1f})"


def print_tables(console: Console, tables: Iterable[RecordTable], records: Path | None = None) -> None:
    """Print tables, each with its remarks below, and last the file of their records."""
    for one in tables:
        console.print(as_rich(one))
        for remark in one.remarks:
            console.print(remark, soft_wrap=True)
    if records is not None:
        console.print(f"Records: {records}", soft_wrap=True)


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


def latest_by_network(records: Iterable[Record], kind: str) -> list[list[Record]]:
    """Return the last record of each thing measured, of one kind, grouped by cell and environment."""
    last = latest(record for record in records if record.kind == kind)
    groups = grouped(last, lambda record: (json.dumps(record.cell, sort_keys=True), record.environment_key))
    return list(groups.values())


def network_in_words(record: Record) -> str:
    """Return the network, batch, heads and input of a record, its GPU and its torch, in one line."""
    cell, environment = record.cell, record.environment
    kind = f"{cell['heads']} " if "heads" in cell else ""
    return (
        f"{cell['model']} {cell['dtype']}, batch {cell['batch']}, {cell['classes']} classes, "
        f"{len(cell['taps'])} {kind}heads ({cell['placement']}), {'x'.join(map(str, cell['input']))}; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}"
    )


#: Returns the tables of those records that are of its kinds, none if there are none.
MakeTables = Callable[[Sequence[Record]], list[RecordTable]]


def table_command(**makers: MakeTables) -> Callable[..., None]:
    """Return the command ``table``.

    Args:
        **makers: by the kind of records, in the order of the output.
    """
    *others, last = makers
    kinds = f"{', '.join(others)} or {last}"

    def table(
        records: Annotated[Path, typer.Argument(help=f"A .jsonl file of {kinds}.", show_default=False)],
        markdown: Annotated[bool, typer.Option("--markdown", help="For a README.")] = False,
    ) -> None:
        """Print the tables of records again: all times, and of sweeps the winners."""
        with one_line_errors(BadRecord), no_garbage_collection():
            with activity(f"Reading {records}"):
                found = read_records(records)
            there = {one.kind for one in found}
            with activity(f"Making tables of {len(found):,} records"):
                with made_of([records]):
                    tables = [table for kind, make in makers.items() if kind in there for table in make(found)]
            if not tables:
                raise BadRecord(f"RECORDS: {records} holds none of {kinds}, wants some")
            if markdown:
                plain_console().print("\n".join(as_markdown(one) for one in tables), soft_wrap=True)
            else:
                print_tables(wide_console(), tables)

    return table
