"""The command ``auxhead-tune``; a function or a module for each of its subcommands."""

import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from ..model.bad_input import BadInput
from ..model.commands.errors import one_line_errors
from .bench.measure import run_cell
from .bench.selection import ROUNDS, BenchOptions, check_patterns, unsettled
from .bench.variants import RUNNERS, TRUNKS, catalogue
from .footprint.command import footprint
from .footprint.tables import footprint_tables
from .heads.command import heads
from .heads.tables import head_tables
from .measuring.cells import STAGES, Cell, Dtype, Placement, chosen_cells
from .measuring.environment import environment, this_device
from .measuring.failures import DeviceLost
from .measuring.interrupts import resumable
from .measuring.subject import Subject, build_subject, is_factory, load_subject
from .overlap.command import overlap
from .overlap.tables import overlap_tables
from .pareto.command import pareto
from .pareto.tables import pareto_tables
from .plan.command import plan
from .records.record import BadRecord, read_records, records_path
from .records.tables import as_markdown, bench_tables, print_tables, wide_console
from .sweep.command import sweep
from .sweep.tables import sweep_tables
from .tuned.command import explain, promote

app = typer.Typer(
    help="Benchmarks and tuning on your GPU, kept as records.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

#: What tables are made of.
_KINDS = "bench, heads, pareto, overlap, footprint or sweep"
#: Rounds of ``--quick``.
QUICK_ROUNDS = 20


app.command()(sweep)


@app.callback()
def main() -> None:
    """Benchmarks and tuning on your GPU, kept as records."""


@app.command()
def bench(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="resnet18, resnet34, resnet50, or your own: package.module:function, which takes nothing and returns "
            "(EarlyExitNetwork in eval mode, example batch), both on the GPU.",
            show_default=False,
        ),
    ] = None,
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
        int | None, typer.Option(min=1, help=f"Timed rounds.  [default: {ROUNDS}; with --quick {QUICK_ROUNDS}]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Records are appended here.  [default: autotune-records/bench-DEVICE.jsonl]")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what is already there.")] = False,
) -> None:
    """Measure this project's runners against the bare network, naive heads, plain graphs and torch.compile.

    Every option that chooses may be given several times. A run that was stopped goes on where it was.
    """
    console = wide_console()
    with one_line_errors(BadRecord), resumable():
        device = this_device("bench")
        own, cells = _what(model or [], dtype or [], batch or [], classes or [], placement or [], quick)
        wanted = tuple(variant or (_QUICK_VARIANTS if quick else ()))
        where_to_exit = tuple(exits or (_QUICK_EXITS if quick else ()))
        _check_variants(wanted, cells)
        check_patterns(where_to_exit, cells)
        where = records_path(out, "bench", torch.cuda.get_device_name(device))
        progress = _Progress(console)
        plan = BenchOptions(
            out=where,
            environment=environment(device),
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            wanted=wanted,
            fresh=fresh,
            exits=where_to_exit,
            say=progress.say,
        )
        left = unsettled(cells, plan)
        progress.total = sum(len(units) for _, units in left)
        failed = []
        with progress:
            for cell, units in left:
                try:
                    run_cell(own or build_subject(cell, device), units, plan, progress.unit_done)
                except DeviceLost as error:
                    raise BadInput(f"{error}; it is recorded: the same command goes on with the rest") from None
                except (RuntimeError, ValueError) as error:  # no memory for the network itself, say
                    failed.append(f"{cell}: {' '.join(str(error).split())}")
                    progress.say(f"FAILED {failed[-1]}", True)
        chosen = {_identity(cell.as_json()) for cell in cells}
        found = read_records(where) if where.exists() else []
        print_tables(console, bench_tables(record for record in found if _identity(record.cell) in chosen))
        console.print(f"Records: {where}", soft_wrap=True)
        if failed:
            raise BadInput(f"{len(failed)} of {len(left)} cells could not be measured, the first: {failed[0]}")


app.command()(heads)
app.command()(pareto)
app.command()(overlap)
app.command()(footprint)


@app.command()
def table(
    records: Annotated[
        Path,
        typer.Argument(help=f"A .jsonl file of {_KINDS}.", show_default=False),
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="For a README.")] = False,
) -> None:
    """Print the tables of records again: all times, of sweeps the winners."""
    with one_line_errors(BadRecord):
        found = read_records(records)
        tables = [*bench_tables(found), *head_tables(found), *pareto_tables(found), *overlap_tables(found)]
        tables += [*footprint_tables(found), *sweep_tables(found)]
        if not tables:
            raise BadInput(f"RECORDS: {records} holds none of {_KINDS}, wants some")
        if markdown:
            print("\n".join(as_markdown(one) for one in tables))
        else:
            print_tables(wide_console(), tables)


app.command()(plan)
app.command()(promote)
app.command()(explain)


#: What takes seconds to build.
_QUICK_VARIANTS = (
    "eager*",
    "graph-*@as_is",
    "graph-*@cudnn",
    *(f"{runner}@{trunk}" for runner in RUNNERS for trunk in TRUNKS),
)
#: Exit patterns of ``--quick``.
_QUICK_EXITS = ("never", "layer1")


class _Progress:
    """How far the run is, what is being done, and about how long the rest takes.

    One line that changes on a terminal; elsewhere a line for each exit pattern of a cell. What is to be kept is printed
    in either case.
    """

    def __init__(self, console: Console) -> None:
        self.total = 0
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._done = 0
        self._printed = -1
        self._began = time.monotonic()

    def __enter__(self) -> "_Progress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, what: str, keep: bool) -> None:
        """Show what begins."""
        taken = time.monotonic() - self._began
        left = f", about {taken / self._done * (self.total - self._done) / 60:.0f} min left" if self._done else ""
        line = f"{self._done + 1} of {self.total}{left}: {what}"
        if self._status is not None:
            self._status.update(escape(line))
        if keep or (self._status is None and self._printed != self._done):
            self._console.print(line, soft_wrap=True)
            self._printed = self._done

    def unit_done(self) -> None:
        """Count one exit pattern of one cell."""
        self._done += 1


def _what(
    models: Sequence[str],
    dtypes: Sequence[Dtype],
    batches: Sequence[int],
    classes: Sequence[int],
    placements: Sequence[Placement],
    quick: bool,
) -> tuple[Subject | None, list[Cell]]:
    """Return the user's own network, if it is one, and the cells to measure."""
    for name in models:
        if not is_factory(name) and name not in STAGES:
            raise BadInput(f"--model: got {name}, wants one of {', '.join(STAGES)} or package.module:function")
    if any(is_factory(name) for name in models):
        if quick:
            raise BadInput("--quick: chooses cells of the core matrix, wants no network of your own beside it")
        if len(models) > 1:
            raise BadInput(f"--model: got {len(models)} of them, wants a factory alone")
        for option, values in (("dtype", dtypes), ("batch", batches), ("classes", classes), ("placement", placements)):
            if values:
                raise BadInput(f"--{option}: is that of the network which {models[0]} returns, wants no value here")
        sys.path.insert(0, "")  # as `python -m` does: the user's module lies where the command is run
        own = load_subject(models[0])
        return own, [own.cell]
    return None, chosen_cells(
        quick=quick,
        models=models,
        dtypes=[dtype.value for dtype in dtypes],
        batches=batches,
        classes=classes,
        placements=[placement.value for placement in placements],
    )


def _check_variants(wanted: Sequence[str], cells: Sequence[Cell]) -> None:
    """Refuse a glob that no variant has, which would measure nothing of what was meant."""
    names = list(dict.fromkeys(variant.name for cell in cells for variant in catalogue(cell)))
    for glob in wanted:
        if not fnmatch.filter(names, glob):
            raise BadInput(f"--variant: got {glob}, wants names or globs of: {', '.join(names)}")


def _identity(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


if __name__ == "__main__":
    app()
