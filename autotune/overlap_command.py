"""The command ``auxhead-tune overlap``."""

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..model.bad_input import BadInput
from ..model.one_line_errors import one_line_errors
from .cells import Cell
from .environment import clocks, environment
from .network_choice import Batches, Classes, Dtypes, Model, NetworkChoice, Placements
from .overlap_measurement import measure_overlap
from .overlap_records import KIND, failed_record, overlap_records
from .overlap_tables import overlap_tables
from .record import BadRecord, Record, append_record, default_path
from .subject import Subject, build_subject
from .sweep import Status
from .sweep_progress import SweepProgress
from .tables import print_tables, wide_console
from .timing import VariantFailed


def overlap(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Records are appended here.", show_default="autotune-records/overlap-DEVICE.jsonl"),
    ] = None,
) -> None:
    """Measure whether a network's heads run beside its trunk, and what that costs the trunk.

    The trunk alone, the heads alone and both take turns without a profiler; then replays are profiled, and one of them
    is kept kernel by kernel, for `auxhead-plot timeline`. Options that choose networks may be given several times.
    """
    console = wide_console()
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    with one_line_errors(BadRecord):
        if not torch.cuda.is_available():
            raise BadInput("overlap: torch sees no CUDA device here, wants one; `auxhead-tune table` needs none")
        device = torch.device("cuda", torch.cuda.current_device())
        where = out or default_path(KIND, torch.cuda.get_device_name(device))
        own = chosen.own()
        cells = [own.cell] if own is not None else chosen.cells()
        found: list[Record] = []
        with SweepProgress(console) as progress:
            for number, cell in enumerate(cells):

                def begins(what: str, share: float, cell: Cell = cell, before: int = number) -> None:
                    progress.show(Status((before + share) / len(cells), f"{cell}: {what}", "", Counter()))

                begins("building", 0.0)
                for record in _measure(cell, own, device, begins):
                    append_record(where, record)
                    found.append(record)
                gc.collect()
                torch.cuda.empty_cache()
        print_tables(console, overlap_tables(found))
        console.print(f"Records: {where}", highlight=False, soft_wrap=True)
        failed = [record for record in found if record.error is not None]
        if failed:
            raise BadInput(
                f"{len(failed)} of {len(cells)} networks could not be measured, the first: {failed[0].error}"
            )


def _measure(
    cell: Cell, own: Subject | None, device: torch.device, begins: Callable[[str, float], None]
) -> list[Record]:
    """Return the records of one network; a failure is one, too."""
    of_device = environment(device)
    try:
        measured = measure_overlap(own or build_subject(cell, device), begins)
    except (RuntimeError, ValueError) as error:  # no memory, a wrong answer, a trace that holds too little
        why = error.__cause__ if isinstance(error, VariantFailed) and error.__cause__ else error
        return [failed_record(cell, f"{type(why).__name__}: {' '.join(str(why).split())}"[:500], of_device)]
    return overlap_records(cell, measured, {**of_device, "clocks": clocks(device)})
