"""Options of the command ``auxhead-tune sweep``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.failures import resumable
from ..measuring.options import MODEL_HELP, Batches, Classes, Dtypes, NetworkChoice, Placements, out_option, values_of
from ..records.record import BadRecord, check_out

#: The name, in place of a network's, of the broad set: heads that belong to none.
_BROAD = "broad"


def sweep(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP} Or {_BROAD}: heads of no network.", show_default=False)],
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Only measure, in seconds a head, what the tables of all GPUs have for it.")
    ] = False,
    out: Annotated[Path | None, out_option("sweep")] = None,
) -> None:
    """Tune the launches of a network's heads, or of the broad set, each head alone.

    Options that choose networks may be given several times; winners of batch sizes given together are measured at each
    other's, too. What is recorded is not measured again: a run that was stopped, at whatever moment, goes on where it
    was.
    """
    with one_line_errors(BadRecord):
        asked = {"batch": batch, "dtype": dtype, "classes": classes, "placement": placement}
        if model == _BROAD:
            for name in values_of(asked):
                raise BadInput(
                    f"--{name}: chooses networks, wants no value here: heads of {_BROAD} have sizes of their own"
                )
        chosen = None if model == _BROAD else NetworkChoice.of(model, **asked)
        check_out(out)
        with resumable():
            from .run import run_sweep
            from .search import QUICK, TABLES

            run_sweep(chosen, TABLES if tables else QUICK, out)
