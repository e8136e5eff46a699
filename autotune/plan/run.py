"""Runs ``exits="auto"`` on a network, and prints the table of what it measured, chose and why."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...model import AutoRunner
from ...model.auto.plan import Plan
from ...model.basics.bad_input import BadInput
from ..measuring.cells import OWN, Cell
from ..measuring.environment import this_device
from ..measuring.options import check_patterns, chosen_patterns
from ..measuring.subject import build_subject, find_subject
from ..records.summaries import percentiles
from ..records.tables import RecordTable, percentiles_in_words, print_tables, wide_console

_COLUMNS = ("runner", "host to answer, us", "device, us", "host/plain", "device/plain", "")


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
            title = f"{measured}; trunk {trunk}; exits {pattern}"
            print_tables(console, [_table(title, made, subject.network.taps)])


@contextmanager
def _one_line_of(cell: Cell) -> Iterator[None]:
    """Tell in one line of a layer that cannot be captured, no memory, or a folder as plan file."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise BadInput(f"{cell}: {' '.join(str(error).split())}") from None


def _table(title: str, made: Plan, taps: Sequence[str]) -> RecordTable:
    """Return what was measured, with the choice and its reason below."""
    rows = []
    for name, times in made.times.items():
        marks = [mark for mark, marked in (("chosen", made.chosen.name), ("plain graph", made.plain)) if name == marked]
        pairs = zip(times, made.times[made.plain], strict=True)
        ratios = (f"{statistics.median(us) / statistics.median(plain_us):.3f}" for us, plain_us in pairs)
        us = (percentiles_in_words(percentiles(us)._asdict()) for us in times)
        rows.append((name, *us, *ratios, ", ".join(marks)))
    trunks = [f"{kind} {statistics.median(us.host):,.1f}" for kind, us in made.trunk_times.items()]
    leave = ", ".join(f"{share:.0%} {where}" for share, where in zip(made.shares, (*taps, "classifier"), strict=True))
    remarks = [
        *([f"The plain graph by trunk, us: {', '.join(trunks)}."] if trunks else []),
        *(f"{name} left out: {why}" for name, why in made.left_out.items()),
        f"Samples leave at: {leave}.",
        f"{made.chosen.name[:1].upper()}{made.chosen.name[1:]}: {made.reason()}.",
        f"From the plan file, measured at {made.utc}." if made.from_file else "Measured now.",
        "",
    ]
    return RecordTable(title, _COLUMNS, 1, rows, remarks)
