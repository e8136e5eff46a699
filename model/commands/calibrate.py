"""The command ``auxhead calibrate``."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from ..basics.bad_input import BadInput
from .console import plain_console
from .errors import one_line_errors
from .options import (
    BackboneOption,
    CheckpointArgument,
    DataOption,
    DeviceOption,
    Draw,
    ModulesOption,
    SaveFigure,
    SkipDamagedOption,
    check_output_directory,
)


def calibrate_command(beyond: Callable[[], tuple[Mapping[str, Draw], SaveFigure]]) -> Callable[..., None]:
    """Return the command ``calibrate``, given what imports what draws its figures, by name, and saves them."""

    def calibrate(
        checkpoint: CheckpointArgument,
        data: DataOption = None,
        backbone: BackboneOption = None,
        modules: ModulesOption = None,
        train_data: Annotated[
            Path | None,
            typer.Option(
                help="Images that your network has learned from, a folder a class, left out under any name; or none."
            ),
        ] = None,
        skip_damaged: SkipDamagedOption = False,
        max_accuracy_drop: Annotated[
            float | None,
            typer.Option(
                min=0.0,
                max=1.0,
                help="What leaving early may cost, a fraction.",
                show_default="0.01, or none with another budget",
            ),
        ] = None,
        confidence: Annotated[float, typer.Option(help="Of the bound on that, between 0 and 1.")] = 0.9,
        batch: Annotated[
            int | None, typer.Option(min=1, help="Images a request; times of the answers are measured for it.")
        ] = None,
        max_latency_ms: Annotated[
            float | None, typer.Option(help="What a request may take on average instead; wants --batch.")
        ] = None,
        max_work: Annotated[
            float | None,
            typer.Option(
                min=0.0,
                max=1.0,
                help="Instead, how much of the backbone an image may take on average, a fraction of its FLOPs.",
            ),
        ] = None,
        curve: Annotated[
            bool,
            typer.Option("--curve", help="Also test accuracy against work, and time with --batch, at all thresholds."),
        ] = False,
        seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the splits.")] = 0,
        out: Annotated[Path, typer.Option(help="Where the calibrated checkpoint, report and figure go.")] = Path(
            "auxhead-calibrated"
        ),
        device: DeviceOption = "auto",
    ) -> None:
        """Fit temperatures and thresholds to images that the network has not seen, with a bound on what they cost.

        Images that the network has learned from are left out, as its checkpoint knows them. Of the others 20 % are for
        temperatures, 50 % for thresholds, and 30 % for the test, whose numbers are printed. Several processes of
        torchrun share the batches.
        """
        asked = SimpleNamespace(**locals())
        from ..processes.process_group import own_rank
        from ..processes.rank_failures import RankFailed
        from .calibrate_run import run_calibration
        from .processes import process_group

        draws, save_figure = beyond()
        with one_line_errors(ValueError, RankFailed), process_group(device) as where:
            if own_rank() == 0:  # which alone writes; another host has another disk
                check_output_directory(out)
            if os.path.realpath(out) == os.path.realpath(checkpoint):
                raise BadInput(f"--out: {out} is the checkpoint itself, wants another directory")
            run_calibration(
                plain_console(), asked, where, lambda name, report: save_figure(*draws[name](report), out / name)
            )

    return calibrate
