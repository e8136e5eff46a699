"""Runs the benchmark: selects variants and exit patterns that no record has, measures them, and prints the tables."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ...model.basics.bad_input import BadInput
from ..measuring.cells import Cell, chosen_cells
from ..measuring.environment import environment, this_device
from ..measuring.failures import DeviceLost, Failure
from ..measuring.options import check_globs, check_patterns, chosen_patterns, is_factory
from ..measuring.progress import SweepProgress
from ..measuring.subject import Subject, build_subject, find_subject
from ..records.record import Record, is_settled, read_records, records_path
from ..records.tables import print_tables, wide_console
from .measure import BenchOptions, PatternRun, run_cell
from .tables import bench_tables
from .variants import Variant, bare_name, catalogue, truncated_name


def chosen_variants(cell: Cell, pattern: str, wanted: Sequence[str]) -> list[Variant]:
    """Return the variants asked for that run in that pattern, with the baselines of their ratios."""
    known = [variant for variant in catalogue(cell) if variant.runs(pattern)]
    asked = [
        variant
        for variant in known
        if (any(fnmatchcase(variant.name, glob) for glob in wanted) if wanted else variant.by_default)
    ]
    trunks = {variant.trunk for variant in asked}
    baselines = {name(trunk) for trunk in trunks for name in (bare_name, truncated_name)}
    baselines |= {variant.plain for variant in asked if variant.plain}
    return [variant for variant in known if variant in asked or variant.name in baselines] if asked else []


def check_variants(wanted: Sequence[str], cells: Sequence[Cell]) -> None:
    """Refuse a glob that fits no variant, with ``BadInput``."""
    check_globs("--variant", wanted, (variant.name for cell in cells for variant in catalogue(cell)))


def pattern_runs(cell: Cell, options: BenchOptions, records: Iterable[Record]) -> list[PatternRun]:
    """Return the runs of a cell that are still to be measured.

    All chosen variants of a pattern are measured together as long as one is missing, for its ratios are to variants of
    the same run; what failed before and would fail again is left out.
    """
    settled = {record.key: record for record in records if is_settled(record, options.environment, options.rounds)}
    runs = []
    for pattern in chosen_patterns(cell, options.exits):
        chosen = chosen_variants(cell, pattern, options.wanted)
        if not options.fresh:
            found = {variant.name: settled.get(_key(cell, pattern, variant.name)) for variant in chosen}
            if all(found.values()):
                continue
            chosen = [variant for variant in chosen if not ((record := found[variant.name]) and record.error)]
        if chosen:
            runs.append(PatternRun(cell, pattern, chosen))
    return runs


def unsettled(cells: Sequence[Cell], options: BenchOptions) -> list[tuple[Cell, list[PatternRun]]]:
    """Return the cells that are not done, each with the runs that are left.

    Raises:
        BadRecord: ``options.out`` cannot be read.
    """
    records = read_records(options.out) if options.out.exists() else []
    left = [(cell, pattern_runs(cell, options, records)) for cell in cells]
    return [(cell, runs) for cell, runs in left if runs]


def _key(cell: Cell, pattern: str, variant: str) -> tuple[str, str, str]:
    return Record("bench", cell.as_json(), pattern, variant, "", "", {}, {}).key


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
