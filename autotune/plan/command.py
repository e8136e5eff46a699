"""Options of the command ``auxhead-tune plan``, and the table of what ``exits="auto"`` measured, chose and why."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ...model import AutoRunner
from ...model.auto.plan import Plan
from ...model.bad_input import BadInput
from ...model.commands.errors import one_line_errors
from ..bench.selection import check_patterns, chosen_patterns
from ..bench.variants import AS_IS, MORE_TRUNKS, TRUNKS, samples_for_auto
from ..measuring.cells import OWN, Cell, Dtype, Placement, resnet_cell
from ..measuring.environment import this_device
from ..measuring.options import MODEL_HELP, check_model, own_network
from ..measuring.subject import build_subject, is_factory
from ..records.spread import spread
from ..records.tables import spread_in_words, wide_console


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
        list[int] | None, typer.Option(min=1, help="Images a call (default: 1, or those of your example).")
    ] = None,
    exits: Annotated[
        list[str] | None,
        typer.Option(
            help="Where samples leave, names or globs: never, a tap, own, 40/30/20/10 (default: own, or all)."
        ),
    ] = None,
    trunk: Annotated[str, typer.Option(help=f"How the backbone is run: {', '.join((*TRUNKS, *MORE_TRUNKS))}.")] = AS_IS,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of weights and inputs of a ResNet (default: float16).", show_default=False)
    ] = None,
    classes: Annotated[
        int | None, typer.Option(min=1, help="Of every exit of a ResNet (default: 1000).", show_default=False)
    ] = None,
    placement: Annotated[
        Placement | None,
        typer.Option(help="Heads of a ResNet: after every block or stage (default: stages).", show_default=False),
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
) -> None:
    """Measure every way to run a network on this GPU, and say which is best and why.

    make_runner(..., exits="auto", plan=FILE) with the same network, samples, batch sizes and trunk takes what was
    chosen here with --plan FILE.
    """
    console = wide_console()
    with one_line_errors():
        if trunk not in (*TRUNKS, *MORE_TRUNKS):
            raise BadInput(f"--trunk: got {trunk}, wants one of {', '.join((*TRUNKS, *MORE_TRUNKS))}")
        device = this_device("plan", "")
        if is_factory(model):
            given = {"dtype": dtype, "classes": classes, "placement": placement}
            subject = own_network(model, **{name: [value] for name, value in given.items() if value is not None})
            samples = subject.example
            patterns = exits or [OWN]
        else:
            check_model("MODEL", model)
            where = placement or Placement.stages
            cell = resnet_cell(model, (dtype or Dtype.float16).value, max(batch or [1]), classes or 1000, where.value)
            patterns = exits or []
            check_patterns(patterns, [cell])  # before the network is made, which takes a while
            with _one_line_of(cell):
                subject = build_subject(cell, device)
            samples = samples_for_auto(subject)
        check_patterns(patterns, [subject.cell])
        sizes = sorted(set(batch or [subject.cell.batch]))
        chosen = chosen_patterns(subject.cell, patterns)
        if plan_file is not None and len(chosen) != 1:
            raise BadInput(f"--plan: holds the plan of one exit pattern, got {', '.join(chosen)}; name one by --exits")
        for pattern in chosen:
            with subject.exits(pattern), console.status(f"{subject.cell}; exits {pattern}"), _one_line_of(subject.cell):
                runner = AutoRunner(subject.network, samples, batch_sizes=sizes, trunk=trunk, plan=plan_file)
                runner.close()
            for size, made in runner.plans.items():
                cell = dataclasses.replace(subject.cell, batch=size)
                _print(console, f"{cell}; trunk {trunk}; exits {pattern}", made, subject.network.taps)


@contextmanager
def _one_line_of(cell: Cell) -> Iterator[None]:
    """Tell in one line of a layer that cannot be captured, no memory, or a folder as plan file."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"{cell}: {' '.join(str(error).split())}") from None


def _print(console: Console, title: str, made: Plan, taps: Sequence[str]) -> None:
    """Print what was measured, and the choice with its reason."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("runner", no_wrap=True)
    for heading in ("host to answer, us", "device, us", "host / plain", "device / plain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    plain = made.times[made.plain]
    for name, times in made.times.items():
        marks = [mark for mark, marked in (("chosen", made.chosen.name), ("plain graph", made.plain)) if name == marked]
        ratios = [
            f"{statistics.median(us) / statistics.median(plain_us):.3f}"
            for us, plain_us in zip(times, plain, strict=True)
        ]
        table.add_row(name, *(spread_in_words(spread(us)._asdict()) for us in times), *ratios, ", ".join(marks))
    console.print(table)
    leave = ", ".join(f"{share:.0%} {where}" for share, where in zip(made.shares, (*taps, "classifier"), strict=True))
    lines = [f"{name} left out: {why}" for name, why in made.left_out.items()]
    lines += [
        f"Samples leave at: {leave}.",
        f"{made.chosen.name[:1].upper()}{made.chosen.name[1:]}: {made.reason()}.",
        f"From the plan file, measured at {made.utc}." if made.from_file else "Measured now.",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print()
