"""Options of the command ``auxhead-tune coverage``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.commands.errors import one_line_errors


def coverage(
    checkpoint: Annotated[Path, typer.Option(help="A directory written by `auxhead demo`.", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="The images that it was trained on, as the demo takes them.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Or their data set.")] = None,
    root: Annotated[Path | None, typer.Option(help="Where that lies.")] = None,
    max_accuracy_drop: Annotated[float, typer.Option(min=0.0, max=1.0, help="The budget, a fraction.")] = 0.01,
    confidence: Annotated[float, typer.Option(min=0.01, max=0.999, help="Of the bound.")] = 0.9,
    repeats: Annotated[int, typer.Option(min=1, help="Splits, of seeds from 0 on.")] = 100,
    out: Annotated[Path, typer.Option(help="The JSON file.")] = Path("coverage.json"),
) -> None:
    """Calibrate one network on many splits, and count how often accuracy drops by more than the bound says.

    The images are those that the demo did not train on. The network runs once over them, on the CPU; each split is as
    `auxhead calibrate` draws it.
    """
    with one_line_errors():
        from .run import run_coverage

        run_coverage(
            checkpoint, data, dataset, root, max_accuracy_drop=max_accuracy_drop, confidence=confidence,
            repeats=repeats, out=out,
        )  # fmt: skip
