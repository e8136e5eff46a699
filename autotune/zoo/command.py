"""Options of the command ``auxhead-tune zoo``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.commands.errors import one_line_errors
from ...model.commands.options import RUNS_YOUR_CODE
from ..measuring.failures import resumable
from ..measuring.options import out_option
from ..records.record import BadRecord, check_out

#: Images a call, unless asked otherwise.
BATCHES = (1, 8, 32)


def zoo(
    network: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NETWORK]...",
            help="Names of the zoo; or your own, as package.module:function, which takes nothing and returns "
            f"(EarlyExitNetwork in eval mode, example batch), both on the GPU. {RUNS_YOUR_CODE}",
            show_default="all twelve",
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1, 8 and 32")] = None,
    max_autotune: Annotated[
        bool, typer.Option("--max-autotune", help="At batch 1 and 32 also torch.compile's max-autotune: minutes each.")
    ] = False,
    out: Annotated[Path | None, out_option("zoo")] = None,
) -> None:
    """Measure what make_runner chooses by default, on twelve networks, against torch.compile, a CUDA graph and eager.

    Networks have random weights in float16 and three heads by attach, where no image leaves. Each is made in a process
    of its own, with nothing compiled before, and once more in a second one, for the time to the first answer. A run
    that was stopped goes on where it was.
    """
    with one_line_errors(BadRecord), resumable():
        check_out(out)
        from .run import run_zoo

        run_zoo(network or [], batch or BATCHES, max_autotune, out)
