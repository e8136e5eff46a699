"""Options of the command ``auxhead-tune plan``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.cells import Cell, Dtype, Placement, resnet_cell
from ..measuring.names import MORE_TRUNKS, TRUNKS
from ..measuring.options import MODEL_HELP, check_model, check_own, is_factory
from ..measuring.patterns import check_patterns

#: As ``make_runner`` names them; nothing of it is imported to show the help.
_KINDS = (*TRUNKS, *MORE_TRUNKS, "auto")
_BUDGETS = ("quick", "thorough")
#: Options that are for runners on one GPU, and their defaults.
_ALONE = {"trunk": "auto", "budget": "thorough", "plan": None}


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
        str, typer.Option(help="Time to measure in: quick, 10 s, or thorough, 60 s, which compiles the backbone, too.")
    ] = "thorough",
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of weights and inputs of a ResNet.", show_default="float16")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="Of every exit of a ResNet.", show_default="1000")] = None,
    placement: Annotated[
        Placement | None,
        typer.Option(help="Heads of a ResNet: after every block or stage.", show_default="stages"),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Use the plan in this JSON file if it still fits, else measure and write it.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        int, typer.Option(min=1, help="Predict, for so many GPUs, which stages and replicas are fastest. See --link.")
    ] = 1,
    link: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="One way between two of the --devices; NVLink of an H100 has 450 at most.",
            show_default="measured where there are two GPUs, else 300",
        ),
    ] = None,
) -> None:
    """Measure every way to run a network on this GPU, and say which is best and why.

    make_runner(..., plan=FILE) with the same network, samples, batch sizes and trunk takes what was chosen here with
    --plan FILE. With --devices the network's segments are measured, and pipelines of them simulated.
    """
    with one_line_errors():
        for name, value, known in (("trunk", trunk, _KINDS), ("budget", budget, _BUDGETS)):
            if value not in known:
                raise BadInput(f"--{name}: got {value}, wants one of {', '.join(known)}")
        _check_devices(devices, link, {"trunk": trunk, "budget": budget, "plan": plan_file})
        check_model("MODEL", model)
        cell: Cell | None = None
        if is_factory(model):
            given = {"dtype": dtype, "classes": classes, "placement": placement}
            check_own(model, **{name: [value] for name, value in given.items() if value is not None})
        else:
            where = placement or Placement.stages
            cell = resnet_cell(model, (dtype or Dtype.float16).value, max(batch or [1]), classes or 1000, where.value)
            check_patterns(exits or [], [cell])
        if devices > 1:
            from .devices import run_devices

            run_devices(model, cell, batch or [], exits or [], devices, link)
            return
        from .run import run_plan

        run_plan(model, cell, batch or [], exits or [], trunk, budget, plan_file)


def _check_devices(devices: int, link: float | None, given: dict[str, object]) -> None:
    """Refuse options that count on one GPU alone, or on several alone."""
    if devices == 1 and link is not None:
        raise BadInput(f"--link: got {link:g}, wants --devices of 2 or more beside it")
    if link is not None and not link > 0:
        raise BadInput(f"--link: got {link:g}, wants GB/s greater than 0")
    for name, value in given.items():
        if devices > 1 and value != _ALONE[name]:
            raise BadInput(
                f"--{name}: got {value}, wants none beside --devices {devices}: stages are graphs of the backbone"
            )
