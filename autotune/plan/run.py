"""Runs ``exits="auto"`` on a network, and prints the table of what it measured, chose and why."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ...model import AutoRunner
from ...model.auto.plan import Plan
from ...model.basics.bad_input import BadInput
from ..measuring.cells import OWN, Cell
from ..measuring.environment import this_device
from ..measuring.options import check_patterns, chosen_patterns
from ..measuring.subject import build_subject, find_subject
from ..records.summaries import percentiles
from ..records.tables import percentiles_in_words, wide_console


def run_plan(
    model: str,
    cell: Cell | None,
    batches: Sequence[int],
    exits: Sequence[str],
    trunk: str,
    budget: str,
    plan_file: Path | None,
) -> None:
    """Measure and print.

    Args:
        model: the user's factory, unless there is a cell.
        cell: that of a ResNet.
        batches: batch sizes; none: that of the example.
        exits: names or globs of exit patterns; none: that of the user's model, or all.
        trunk: the kind of trunk, or "auto".
        budget: the time to measure in.
        plan_file: keeps the plan.

    Raises:
        BadInput: no CUDA device, no such factory or exit pattern, or a network that cannot be run like this.
    """
    console = wide_console()
    make = find_subject(model) if cell is None else None
    device = this_device("plan", "")
    if make is not None:
        subject = make()
        samples, patterns = subject.example, exits or [OWN]
        check_patterns(patterns, [subject.cell])
    else:
        assert cell is not None
        with _one_line_of(cell):
            subject = build_subject(cell, device)
        samples, patterns = subject.samples_for_auto, exits
    chosen = chosen_patterns(subject.cell, patterns)
    sizes = sorted(set(batches or [subject.cell.batch]))
    if plan_file is not None and len(chosen) != 1:
        raise BadInput(f"--plan: holds the plan of one exit pattern, got {', '.join(chosen)}; name one by --exits")
    for pattern in chosen:
        with subject.exits(pattern), console.status(f"{subject.cell}; exits {pattern}"), _one_line_of(subject.cell):
            runner = AutoRunner(subject.network, samples, batch_sizes=sizes, trunk=trunk, budget=budget, plan=plan_file)
            runner.close()
        for size, made in runner.plans.items():
            measured = dataclasses.replace(subject.cell, batch=size)
            _print(console, f"{measured}; trunk {trunk}; exits {pattern}", made, subject.network.taps)


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
        table.add_row(
            name, *(percentiles_in_words(percentiles(us)._asdict()) for us in times), *ratios, ", ".join(marks)
        )
    console.print(table)
    leave = ", ".join(f"{share:.0%} {where}" for share, where in zip(made.shares, (*taps, "classifier"), strict=True))
    lines = [f"{name} left out: {why}" for name, why in made.left_out.items()]
    if made.trunk_times:
        trunks = [f"{kind} {statistics.median(us.host):,.1f}" for kind, us in made.trunk_times.items()]
        lines.insert(0, f"The plain graph by trunk, us: {', '.join(trunks)}.")
    lines += [
        f"Samples leave at: {leave}.",
        f"{made.chosen.name[:1].upper()}{made.chosen.name[1:]}: {made.reason()}.",
        f"From the plan file, measured at {made.utc}." if made.from_file else "Measured now.",
    ]
    for line in lines:
        console.print(line, soft_wrap=True)
    console.print()
