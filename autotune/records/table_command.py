"""The command ``auxhead-tune table``, given the functions that make tables of records."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from .json_text import no_garbage_collection
from .output import activity, one_line_errors, plain_console
from .record import BadRecord, Record, made_of, read_records
from .tables import RecordTable, as_markdown, print_tables, wide_console

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
