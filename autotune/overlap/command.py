"""Options of the command ``auxhead-tune overlap``."""

from pathlib import Path
from typing import Annotated

import typer

from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements
from ..measuring.run_networks import Begins, Finish, measure_networks
from ..measuring.subject import Subject
from .measure import measure_overlap
from .records import KIND, failed_record, overlap_records
from .tables import overlap_tables


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
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    measure_networks(KIND, chosen, out, _measure, failed_record, overlap_tables)


def _measure(subject: Subject, begins: Begins) -> Finish:
    measured = measure_overlap(subject, begins)
    return lambda cell, of_device: overlap_records(cell, measured, of_device)
