"""Options of the command ``auxhead-tune overlap``."""

from pathlib import Path
from typing import Annotated

from ...model.commands.errors import one_line_errors
from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements, out_option
from ..records.record import BadRecord, check_out


def overlap(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    out: Annotated[Path | None, out_option("overlap")] = None,
) -> None:
    """Measure whether a network's heads run beside its trunk, and what that costs the trunk.

    The trunk alone, the heads alone and both take turns without a profiler; then replays are profiled, and one of them
    is kept kernel by kernel, for `auxhead-plot timeline`. Options that choose networks may be given several times.
    """
    with one_line_errors(BadRecord):
        chosen = NetworkChoice.of(model, batch=batch, dtype=dtype, classes=classes, placement=placement)
        check_out(out)
        from .run import run_overlap

        run_overlap(chosen, out)
