"""The command ``auxhead-tune bench``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..measuring.cells import Cell, Dtype, Placement, chosen_cells
from ..measuring.environment import environment, this_device
from ..measuring.failures import DeviceLost, Failure
from ..measuring.interrupts import resumable
from ..measuring.options import MODEL_HELP, check_model, out_option, own_network
from ..measuring.progress import SweepProgress
from ..measuring.subject import Subject, build_subject, is_factory
from ..records.record import BadRecord, read_records, records_path
from ..records.tables import print_tables, wide_console
from .measure import run_cell
from .selection import ROUNDS, BenchOptions, PatternRun, check_patterns, check_variants, unsettled
from .tables import bench_tables
from .variants import RUNNERS, TRUNKS

#: Rounds of ``--quick``.
QUICK_ROUNDS = 20
#: Variants of ``--quick``, which are built in seconds.
_QUICK_VARIANTS = (
    "eager*",
    "graph-*@as_is",
    "graph-*@cudnn",
    *(f"{runner}@{trunk}" for runner in RUNNERS for trunk in TRUNKS),
)
#: Exit patterns of ``--quick``.
_QUICK_EXITS = ("never", "layer1")


def bench(
    model: Annotated[list[str] | None, typer.Option(help=MODEL_HELP, show_default=False)] = None,
    dtype: Annotated[list[Dtype] | None, typer.Option(help="Of weights and inputs.", show_default=False)] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default=False)] = None,
    classes: Annotated[list[int] | None, typer.Option(min=1, help="Of every exit.", show_default=False)] = None,
    placement: Annotated[
        list[Placement] | None,
        typer.Option(help="A head after every block, every stage, or every stage but the last.", show_default=False),
    ] = None,
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
    console = wide_console()
    asked: dict[str, Sequence[Any]] = {
        "dtype": [one.value for one in dtype or ()],
        "batch": batch or (),
        "classes": classes or (),
        "placement": [one.value for one in placement or ()],
    }
    with one_line_errors(BadRecord), resumable():
        device = this_device("bench")
        own, cells = _chosen(model or (), asked, quick)
        wanted = tuple(variant or (_QUICK_VARIANTS if quick else ()))
        where_to_exit = tuple(exits or (_QUICK_EXITS if quick else ()))
        check_variants(wanted, cells)
        check_patterns(where_to_exit, cells)
        where = records_path(out, "bench", torch.cuda.get_device_name(device))
        options = BenchOptions(
            out=where,
            environment=environment(device),
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            wanted=wanted,
            fresh=fresh,
            exits=where_to_exit,
        )
        left = unsettled(cells, options)
        with SweepProgress(console) as progress:
            failed = _measure(left, own, device, options, progress)
        chosen = [cell.as_json() for cell in cells]
        found = read_records(where) if where.exists() else []
        print_tables(console, bench_tables(record for record in found if record.cell in chosen), where)
        if failed:
            raise BadInput(f"{len(failed)} of {len(left)} cells could not be measured, the first: {failed[0]}")


def _measure(
    left: Sequence[tuple[Cell, Sequence[PatternRun]]],
    own: Subject | None,
    device: torch.device,
    options: BenchOptions,
    progress: SweepProgress,
) -> list[str]:
    """Measure cell by cell; returns a line for each cell that could not be measured."""
    failed = []
    for number, (cell, runs) in enumerate(left):
        begins = progress.of_network(cell, number, len(left))
        try:
            run_cell(own or build_subject(cell, device), runs, options, begins)
        except DeviceLost as error:
            raise BadInput(f"{error}; it is recorded: the same command goes on with the rest") from None
        except (RuntimeError, ValueError) as error:  # no memory for the network itself, say
            failed.append(f"{cell}: {Failure.of(error).detail}")
            begins(f"FAILED: {Failure.of(error).detail}", 1.0)
    return failed


def _chosen(
    models: Sequence[str], asked: Mapping[str, Sequence[Any]], quick: bool
) -> tuple[Subject | None, list[Cell]]:
    """Return the user's own network, if it is one, and the cells to measure."""
    for name in models:
        check_model("--model", name)
    if any(map(is_factory, models)):
        if quick:
            raise BadInput("--quick: chooses cells of the core matrix, wants no network of your own beside it")
        if len(models) > 1:
            raise BadInput(f"--model: got {len(models)} of them, wants a factory alone")
        own = own_network(models[0], **asked)
        return own, [own.cell]
    return None, chosen_cells(quick=quick, model=models, **asked)
