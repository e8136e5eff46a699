"""Options of the command ``auxhead-tune bench``."""

from pathlib import Path
from typing import Annotated

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.cells import RUNNERS, TRUNKS, Dtype, Placement, chosen_cells
from ..measuring.failures import resumable
from ..measuring.options import MODEL_HELP, HeadKinds, check_model, check_own, is_factory, out_option, values_of
from ..records.record import BadRecord, check_out

#: Timed rounds of each variant, unless asked otherwise: ten of each fresh capture.
ROUNDS = 50
#: Rounds of ``--quick``.
QUICK_ROUNDS = 20
#: Variants of ``--quick``, which are built in seconds.
QUICK_VARIANTS = (
    "eager*",
    "graph-*@as_is",
    "graph-*@cudnn",
    *(f"{runner}@{trunk}" for runner in RUNNERS for trunk in TRUNKS),
)
#: Exit patterns of ``--quick``.
QUICK_EXITS = ("never", "layer1")


def bench(
    model: Annotated[list[str] | None, typer.Option(help=MODEL_HELP, show_default=False)] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="Of weights and inputs.", show_default=False)] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default=False)] = None,
    classes: Annotated[list[int] | None, typer.Option(min=1, help="Of every exit.", show_default=False)] = None,
    placement: Annotated[
        list[Placement] | None,
        typer.Option(help="A head after every block, every stage, or every stage but the last.", show_default=False),
    ] = None,
    heads: HeadKinds = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(help="Names or globs, such as 'polled@*'; baselines come along.", show_default=False),
    ] = None,
    exits: Annotated[
        list[str] | None,
        typer.Option(help="Where samples leave, names or globs: never, a tap, own, 40/30/20/10.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two small cells, no torch.compile, few rounds.")] = False,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Timed rounds.", show_default=f"{ROUNDS}; with --quick {QUICK_ROUNDS}"),
    ] = None,
    out: Annotated[Path | None, out_option("bench")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is already there.")] = False,
) -> None:
    """Measure this project's runners against the bare network, naive heads, plain graphs and torch.compile.

    Every option that chooses may be given several times. A run that was stopped goes on where it was.
    """
    asked = values_of({"dtype": dtype, "batch": batch, "classes": classes, "placement": placement, "heads": heads})
    models = model or []
    with one_line_errors(BadRecord), resumable():
        for name in models:
            check_model("--model", name)
        own = next(filter(is_factory, models), None)
        if own is not None:
            if quick:
                raise BadInput("--quick: chooses cells of the core matrix, wants no network of your own beside it")
            if len(models) > 1:
                raise BadInput(f"--model: got {len(models)} of them, wants a factory alone")
            check_own(own, asked)
        check_out(out)
        from .run import run_bench

        run_bench(
            own,
            [] if own else chosen_cells(quick=quick, model=models, **asked),
            variants=tuple(variant or (QUICK_VARIANTS if quick else ())),
            exits=tuple(exits or (QUICK_EXITS if quick else ())),
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            out=out,
            fresh=fresh,
        )
