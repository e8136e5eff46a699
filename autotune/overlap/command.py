"""Options of the command ``auxhead-tune overlap``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.commands.errors import one_line_errors
from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements, out_option
from ..records.record import BadRecord, check_out


def overlap(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    footprints: Annotated[
        bool, typer.Option("--footprints", help="Measure how much room heads may take beside the trunk instead.")
    ] = False,
    out: Annotated[Path | None, out_option("overlap")] = None,
) -> None:
    """Measure whether a network's heads run beside its trunk, and what that costs the trunk.

    The trunk alone, the heads alone and both take turns without a profiler; then replays are profiled, and one of them
    is kept kernel by kernel, for `auxhead-plot timeline`. Options that choose networks may be given several times.

    With --footprints, heads are launched in more or fewer programs, with more or fewer warps, capped in registers and
    SMs, and without priority of the trunk; each way is timed in turns with the trunk alone, and the kernels say which
    SMs they were on. `auxhead-plot footprint` draws it; records go to autotune-records/footprint-DEVICE.jsonl.
    """
    with one_line_errors(BadRecord):
        chosen = NetworkChoice.of(model, batch=batch, dtype=dtype, classes=classes, placement=placement)
        check_out(out)
        from .run import run_overlap

        run_overlap(chosen, out, footprints=footprints)
