"""Options of the command ``auxhead-tune heads``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.failures import resumable
from ..measuring.options import (
    MODEL_HELP,
    Batches,
    Classes,
    Dtypes,
    HeadKinds,
    NetworkChoice,
    Placements,
    out_option,
    values_of,
)
from ..records.record import BadRecord, check_out

#: One in so many random heads is measured through torch.compile, too, which takes 15 s where the others take 1.
COMPILED_EVERY = 20


def heads(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default="none with --random")] = None,
    batch: Batches = None,
    dtype: Dtypes = None,
    classes: Classes = None,
    placement: Placements = None,
    heads: HeadKinds = None,
    random: Annotated[int | None, typer.Option(min=1, help="Measure so many random heads, of no network.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of random heads: the first are the same, however many.", show_default="0"),
    ] = None,
    compiled_sample: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="One in so many random heads also through torch.compile; 0: none.",
            show_default=f"{COMPILED_EVERY}",
        ),
    ] = None,
    out: Annotated[Path | None, out_option("heads", "random-heads")] = None,
) -> None:
    """Measure a network's heads, or random ones, alone: fused, in plain PyTorch, and by torch.compile's max-autotune.

    Each is a chain of launches in a CUDA graph, and its answers are checked first. Options that choose networks may be
    given several times. A run that was stopped goes on where it was. With --random the exit code is 1 if any fused head
    failed or answered wrongly.
    """
    with one_line_errors(BadRecord), resumable():
        asked = {"batch": batch, "dtype": dtype, "classes": classes, "placement": placement, "heads": heads}
        check_out(out)
        if random is None:
            if model is None:
                raise BadInput("MODEL: got none, wants a network; or --random 400 for heads of none")
            for name, value in (("--seed", seed), ("--compiled-sample", compiled_sample)):
                if value is not None:
                    raise BadInput(f"{name}: got {value} without --random, wants --random 400 beside it, or neither")
            chosen = NetworkChoice.of(model, **asked)
            from .run import run_heads

            run_heads(chosen, out)
            return
        given = {"MODEL": [model] if model else None, **{f"--{name}": one for name, one in asked.items()}}
        for name, values in values_of(given).items():
            got = ", ".join(map(str, values))
            raise BadInput(f"{name}: got {got} with --random, which draws heads of no network; leave one of them out")
        from .run_random import run_random_heads

        if run_random_heads(random, seed or 0, COMPILED_EVERY if compiled_sample is None else compiled_sample, out):
            raise typer.Exit(1)
