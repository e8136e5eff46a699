"""The command ``auxhead infer``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..runners.table import EXITS
from .console import plain_console
from .errors import one_line_errors
from .options import BackboneOption, CheckpointArgument, DeviceOption, ModulesOption


def infer(
    checkpoint: CheckpointArgument,
    images: Annotated[
        list[Path], typer.Argument(help="Picture files, or folders of them with all that is below.", show_default=False)
    ],
    backbone: BackboneOption = None,
    modules: ModulesOption = None,
    runner: Annotated[
        Literal[EXITS],  # type: ignore[valid-type]
        typer.Option(help="How the network is run; auto first measures for half a minute, and pays for thousands."),
    ] = "eager",
    batch: Annotated[int, typer.Option(min=1, help="Images that are read and answered together.")] = 64,
    json_lines: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write a JSON object a line to this file, - for standard output.", show_default=False
        ),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Answer for image files, and say which exit answered; several processes of torchrun share the batches."""
    from ..processes.dealing import agree, checkpoint_facts
    from ..processes.rank_failures import RankFailed
    from ..saving.checkpoint_files import read_description
    from .infer_run import run_infer
    from .processes import process_group
    from .user_model import load_network

    with one_line_errors(RankFailed):
        # whether there is a checkpoint is said before what the machine lacks
        with process_group(device, check=lambda: read_description(checkpoint)) as where:
            agree(lambda: checkpoint_facts(checkpoint))
            loaded = load_network("auxhead infer", checkpoint, backbone, modules)
            loaded.network.to(where)
            console = plain_console()
            run_infer(loaded, images, exits=runner, batch=batch, out=json_lines, console=console)
