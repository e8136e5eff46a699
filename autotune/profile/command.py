"""Options of the command ``auxhead-tune profile``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ...model.commands.options import RUNS_YOUR_CODE, BackboneOption, ModulesOption, check_output_directory
from ..measuring.cells import MORE_TRUNKS, RUNNERS, TRUNKS
from ..records.record import BadRecord

#: Trunks of the runners that can be profiled as "after".
_KINDS = (*TRUNKS, *MORE_TRUNKS)


def profile(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="A directory written by `auxhead demo`, `train` or save_checkpoint.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="In place of it package.module:factory, a function that returns (EarlyExitNetwork, a batch), or "
            f"(a model that returns the logits of several exits, a batch). {RUNS_YOUR_CODE}"
        ),
    ] = None,
    backbone: BackboneOption = None,
    modules: ModulesOption = None,
    exits: Annotated[
        str,
        typer.Option(
            metavar=f"<{'|'.join(RUNNERS)}>",
            help="The runner: overlapped computes every head, polled and gated skip what nobody needs.",
        ),
    ] = "overlapped",
    trunk: Annotated[
        str,
        typer.Option(
            metavar=f"<{'|'.join(_KINDS)}>",
            help="The trunk as it is, on cuDNN's fused convolutions, or through Inductor.",
        ),
    ] = "as_is",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples a request.", show_default="the factory's batch; 1 for a checkpoint"),
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests that are counted and timed.")] = 20,
    out: Annotated[Path, typer.Option(help="Where records and the Chrome traces go.")] = Path("auxhead-profile"),
) -> None:
    """Show what a request costs on a GPU, naive early exit before and a runner after.

    Launches, CUDA API calls, host and device time; status 1 if the runner is not in a steady state.
    """
    with one_line_errors(BadRecord):
        if (model is None) == (checkpoint is None):
            got = "neither" if model is None else "both"
            raise BadInput(f"CHECKPOINT, --model: got {got}, wants exactly one of the two")
        if checkpoint is None and (backbone or modules):
            raise BadInput("--backbone, --modules: belong to a checkpoint; the network of --model has its heads")
        for name, value, known in (("exits", exits, RUNNERS), ("trunk", trunk, _KINDS)):
            if value not in known:
                raise BadInput(f"--{name}: got {value}, wants one of {', '.join(known)}")
        check_output_directory(out)
        from .run import run_profile

        steady = run_profile(
            model, checkpoint, backbone=backbone, modules=modules, exits=exits, trunk=trunk, batch=batch,
            requests=requests, out=out,
        )  # fmt: skip
    if not steady:
        raise typer.Exit(1)
