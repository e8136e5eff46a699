"""The command ``auxhead-tune footprint``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..measuring.cells import Cell
from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements
from ..measuring.run_networks import Begins, Finish, measure_networks
from ..measuring.subject import Subject
from ..records.record import Record
from .measure import measure_footprints
from .nsight_compute import count_active
from .records import KIND, failed_record, footprint_records
from .tables import footprint_tables


def footprint(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Records are appended here.", show_default="autotune-records/footprint-DEVICE.jsonl"),
    ] = None,
) -> None:
    """Measure how much room a network's heads take beside its trunk, and where that stops being free.

    Heads are launched in more or fewer programs, with more or fewer warps, capped in registers and SMs, and without
    priority of the trunk; each way is timed in turns with the trunk alone, and the kernels say which SMs they were on.
    Where `ncu` is on the PATH, Nsight Compute counts warps, too. `auxhead-plot footprint` draws it. Options that choose
    networks may be given several times.
    """
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    measure_networks(KIND, chosen, out, _measure, failed_record, footprint_tables)


def _measure(subject: Subject, begins: Begins) -> Finish:
    measured, device = measure_footprints(subject, begins), subject.example.device

    def finish(cell: Cell, of_device: Mapping[str, Any]) -> list[Record]:
        begins("warps active, by Nsight Compute", 0.95)  # now that the clocks have been read
        counted = count_active(cell, measured, device)
        return footprint_records(cell, measured, counted, of_device)

    return finish
