"""Options of the command ``auxhead-tune plan``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.cells import MORE_TRUNKS, TRUNKS, resnet_cell
from ..measuring.options import MODEL_HELP, check_model, check_patterns, is_factory

#: As ``make_runner`` names them; nothing of it is imported to show the help.
_KINDS = (*TRUNKS, *MORE_TRUNKS, "auto")
_BUDGETS = ("quick", "standard", "thorough")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"{MODEL_HELP} The batch is what is measured with: it should be like the requests to come.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1, or those of your example")
    ] = None,
    exits: Annotated[
        list[str] | None,
        typer.Option(
            help="Where samples leave, names or globs: never, a tap, own, 40/30/20/10.",
            show_default="own of your model, else all",
        ),
    ] = None,
    trunk: Annotated[
        str, typer.Option(help=f"How the backbone is run: {', '.join(_KINDS)}; auto measures them, too.")
    ] = "auto",
    budget: Annotated[
        str,
        typer.Option(
            help="Time to measure in: quick, 10 s, which compiles no backbone; standard, 30 s; thorough, 60 s."
        ),
    ] = "thorough",
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Use the plan in this JSON file if it still fits, else measure and write it.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Say, too, what to take on so many GPUs like this one, by what is measured here: one, replicas, "
            "parallelize or pipelined. MODEL may then be on the CPU, and too large for one.",
            show_default="no advice",
        ),
    ] = None,
) -> None:
    """Measure every way to run a network on this GPU, and say which is best and why.

    A ResNet has random weights in float16, and heads of 1000 classes after its stages.

    make_runner(..., plan=FILE) with the same network, samples, batch sizes and trunk takes what was chosen here with
    --plan FILE.
    """
    with one_line_errors():
        for name, value, known in (("trunk", trunk, _KINDS), ("budget", budget, _BUDGETS)):
            if value not in known:
                raise BadInput(f"--{name}: got {value}, wants one of {', '.join(known)}")
        check_model("MODEL", model)
        cell = None if is_factory(model) else resnet_cell(model, "float16", max(batch or [1]), 1000, "stages")
        if cell is not None:
            check_patterns(exits or [], [cell])
        from .run import run_plan

        run_plan(model, cell, batch or [], exits or [], trunk, budget, plan_file, gpus)
