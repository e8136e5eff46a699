"""Runs the benchmark: selects what is to be measured, measures cell by cell, and prints the tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...model.basics.bad_input import BadInput
from ..measuring.cells import Cell, chosen_cells
from ..measuring.environment import environment, this_device
from ..measuring.failures import DeviceLost, Failure
from ..measuring.options import check_patterns, is_factory
from ..measuring.progress import SweepProgress
from ..measuring.subject import Subject, build_subject, find_subject
from ..records.record import read_records, records_path
from ..records.tables import print_tables, wide_console
from .measure import run_cell
from .selection import BenchOptions, PatternRun, check_variants, unsettled
from .tables import bench_tables


def run_bench(
    models: Sequence[str],
    asked: Mapping[str, Sequence[Any]],
    *,
    quick: bool,
    variants: tuple[str, ...],
    exits: tuple[str, ...],
    rounds: int,
    out: Path | None,
    fresh: bool,
) -> None:
    """Measure and print; the arguments are the options, ``asked`` those that choose cells.

    Raises:
        BadInput: no CUDA device, no such factory, variant or exit pattern, or a cell that could not be measured.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()
    make = find_subject(models[0]) if any(map(is_factory, models)) else None
    cells = [] if make else chosen_cells(quick=quick, model=models, **asked)
    if make is None:
        _check(variants, exits, cells)
    device = this_device("bench")
    own = make() if make else None
    if own is not None:
        cells = [own.cell]
        _check(variants, exits, cells)
    where = records_path(out, "bench", torch.cuda.get_device_name(device))
    options = BenchOptions(
        out=where, environment=environment(device), rounds=rounds, wanted=variants, fresh=fresh, exits=exits
    )
    left = unsettled(cells, options)
    with SweepProgress(console) as progress:
        failed = _measure(left, own, device, options, progress)
    chosen = [cell.as_json() for cell in cells]
    found = read_records(where) if where.exists() else []
    print_tables(console, bench_tables(record for record in found if record.cell in chosen), where)
    if failed:
        raise BadInput(f"{len(failed)} of {len(left)} cells could not be measured, the first: {failed[0]}")


def _check(variants: Sequence[str], exits: Sequence[str], cells: Sequence[Cell]) -> None:
    check_variants(variants, cells)
    check_patterns(exits, cells)


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
