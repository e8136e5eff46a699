"""Options of the command ``auxhead-tune earlyon``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.commands.errors import one_line_errors


def earlyon(
    seeds: Annotated[int, typer.Option(min=1, help="Splits and parameters, of seeds from 0 on.")] = 10,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images, of each training.")] = 20,
    max_accuracy_drop: Annotated[float, typer.Option(min=0.0, max=1.0, help="The budget, a fraction.")] = 0.01,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("earlyon.json"),
) -> None:
    """Train and calibrate one backbone by earlyon and by this package, and compare accuracy and exits.

    Both get the same digits, splits, epochs and budget, on the CPU, and take their own defaults for all else. It wants
    `pip install earlyon==0.3.0`, and takes about two minutes a seed.
    """
    with one_line_errors():
        from .run import run_earlyon

        run_earlyon(seeds=seeds, epochs=epochs, max_accuracy_drop=max_accuracy_drop, out=out)
