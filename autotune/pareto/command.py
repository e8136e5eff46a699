"""Options of the command ``auxhead-tune pareto``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.names import TRUNKS
from ..measuring.options import out_option
from ..records.record import BadRecord, check_out


def pareto(
    checkpoint: Annotated[Path, typer.Option(help="A directory written by `auxhead demo`.", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="The images that it was trained on, as the demo takes them.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Or their data set.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where that lies.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1 and 64")] = None,
    trunk: Annotated[str, typer.Option(help=f"How the backbone is run: {', '.join(TRUNKS)}.")] = "cudnn",
    out: Annotated[Path | None, out_option("pareto")] = None,
) -> None:
    """Measure what early exit costs in accuracy and saves in time to the answer, for several sets of thresholds.

    They are calibrated on the demo's validation split for at most so much of accuracy; accuracy and times are those of
    its test split. Runners and the bare network take turns, and their answers are checked first.
    """
    with one_line_errors(BadRecord):
        if trunk not in TRUNKS:
            raise BadInput(f"--trunk: got {trunk}, wants one of {', '.join(TRUNKS)}")
        check_out(out)
        from .run import run_pareto

        run_pareto(checkpoint, data, dataset, root, batches=batch or (1, 64), trunk=trunk, out=out)
