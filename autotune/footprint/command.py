"""Options of the command ``auxhead-tune footprint``."""

from pathlib import Path
from typing import Annotated

from ...model.commands.errors import one_line_errors
from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements, out_option
from ..records.record import BadRecord, check_out


def footprint(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    out: Annotated[Path | None, out_option("footprint")] = None,
) -> None:
    """Measure how much room a network's heads take beside its trunk, and where that stops being free.

    Heads are launched in more or fewer programs, with more or fewer warps, capped in registers and SMs, and without
    priority of the trunk; each way is timed in turns with the trunk alone, and the kernels say which SMs they were on.
    `auxhead-plot footprint` draws it. Options that choose networks may be given several times.
    """
    chosen = NetworkChoice.of(model, batch, dtype, classes, placement)
    with one_line_errors(BadRecord):
        chosen.check()
        check_out(out)
        from ..measuring.networks import measure_networks
        from .measure import measure_footprints
        from .records import KIND, failed_record, footprint_records
        from .tables import footprint_tables

        measure_networks(KIND, chosen, out, measure_footprints, footprint_records, failed_record, footprint_tables)
