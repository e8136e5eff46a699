"""Runs a measurement on one network after another: progress, records, failures, tables at the end."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..records.record import BadRecord, Record, append_record, records_path
from ..records.tables import RecordTable, print_tables, wide_console
from .cells import Cell
from .environment import clocks, environment, this_device
from .options import NetworkChoice
from .progress import Status, SweepProgress
from .subject import Subject, build_subject
from .timers import VariantFailed

#: Shows progress: what begins, and the share of the network that is done, 0 to 1.
Begins = Callable[[str, float], None]
#: Makes the records of a measured network from its cell and the environment.
Finish = Callable[[Cell, Mapping[str, Any]], list[Record]]


def measure_networks(
    kind: str,
    chosen: NetworkChoice,
    out: Path | None,
    measure: Callable[[Subject, Begins], Finish],
    failed: Callable[[Cell, str, Mapping[str, Any]], Record],
    tables: Callable[[Iterable[Record]], list[RecordTable]],
) -> None:
    """Measure networks, append their records, and print tables of them.

    Args:
        kind: the kind of the records, which is the command's name, too.
        chosen: the networks.
        out: file of the records; None for the usual one.
        measure: measures one network on a CUDA device. RuntimeError and ValueError are recorded as failures.
        failed: makes the record of a failure from cell, reason and environment.
        tables: makes tables from records.

    Raises:
        typer.Exit: no CUDA device, no such network, or a failure; printed in one line.
    """
    console = wide_console()
    with one_line_errors(BadRecord):
        device = this_device(kind)
        where = records_path(out, kind, torch.cuda.get_device_name(device))
        own, cells = chosen.networks()
        of_device = environment(device)
        found: list[Record] = []
        reasons: list[str] = []
        with SweepProgress(console) as progress:
            for number, cell in enumerate(cells):

                def begins(what: str, share: float, cell: Cell = cell, before: int = number) -> None:
                    progress.show(Status((before + share) / len(cells), f"{cell}: {what}", "", Counter()))

                begins("building", 0.0)
                try:
                    finish = measure(own or build_subject(cell, device), begins)
                except (RuntimeError, ValueError) as error:  # no memory, a wrong answer, a trace that holds too little
                    why = error.__cause__ if isinstance(error, VariantFailed) and error.__cause__ else error
                    reasons.append(f"{type(why).__name__}: {' '.join(str(why).split())}"[:500])
                    records = [failed(cell, reasons[-1], of_device)]
                else:
                    records = finish(cell, {**of_device, "clocks": clocks(device)})
                for record in records:
                    append_record(where, record)
                found += records
                gc.collect()
                torch.cuda.empty_cache()
        print_tables(console, tables(found))
        console.print(f"Records: {where}", soft_wrap=True)
        if reasons:
            raise BadInput(f"{len(reasons)} of {len(cells)} networks could not be measured, the first: {reasons[0]}")
