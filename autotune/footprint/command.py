"""Options of the command ``auxhead-tune footprint``."""

from pathlib import Path
from typing import Annotated

import typer

from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements
from ..measuring.run_networks import Begins, Finish, measure_networks
from ..measuring.subject import Subject
from .measure import measure_footprints
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
    `auxhead-plot footprint` draws it. Options that choose networks may be given several times.
    """
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    measure_networks(KIND, chosen, out, _measure, failed_record, footprint_tables)


def _measure(subject: Subject, begins: Begins) -> Finish:
    measured = measure_footprints(subject, begins)
    return lambda cell, of_device: footprint_records(cell, measured, of_device)
