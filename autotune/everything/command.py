"""Options of the command ``auxhead-tune everything``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.failures import resumable
from ..records.record import BadRecord


def everything(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Records, and what to commit, are put here.")] = Path(
        "autotune-records"
    ),
) -> None:
    """Measure all that a GPU's table and pages need: sweeps, the table, random heads; one GPU, under an hour.

    Says before it starts about how long it takes, and at the end what to commit. A run that was stopped, at whatever
    moment, goes on where it was. The exit code is 1 if any random head failed or answered wrongly.
    """
    from ...kernels.launch.tuned_table import BadTable

    with one_line_errors(BadRecord, BadTable):
        if out.exists() and not out.is_dir():
            raise BadInput(f"--out: got {out}, which is a file, wants a folder")
        with resumable():
            from .run import run_everything

            if run_everything(out):
                raise typer.Exit(1)
