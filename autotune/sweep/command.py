"""Options of the command ``auxhead-tune sweep``."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ...model.commands.errors import one_line_errors
from ..measuring.failures import resumable
from ..measuring.options import Batches, Classes, Dtypes, Model, NetworkChoice, Placements, out_option
from ..records.record import BadRecord, check_out


class Effort(str, Enum):
    """Names of strategies, by the effort that a sweep takes."""

    quick = "quick"
    full = "full"


def sweep(
    model: Model,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    effort: Annotated[Effort, typer.Option(help="Minutes a network, or several times that.")] = Effort.quick,
    out: Annotated[Path | None, out_option("sweep")] = None,
) -> None:
    """Tune the launches of a network's heads, alone and beside the trunk of the captured network.

    Options that choose networks may be given several times; winners of batch sizes given together are measured at each
    other's, too. What is recorded is not measured again: a run that was stopped, at whatever moment, goes on where it
    was.
    """
    with one_line_errors(BadRecord):
        chosen = NetworkChoice.of(model, batch=batch, dtype=dtype, classes=classes, placement=placement)
        check_out(out)
        with resumable():
            from .run import run_sweep

            run_sweep(chosen, effort.value, out)
