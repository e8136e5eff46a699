"""Runs the benchmark: selects variants and exit patterns that no record has, measures them, and prints the tables."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from ...model.basics.bad_input import BadInput
from ..measuring.cells import Cell
from ..measuring.failures import DeviceLost, Failure
from ..measuring.networks import find_networks
from ..measuring.options import check_globs, check_patterns, chosen_patterns
from ..measuring.progress import SweepProgress
from ..records.record import Record, is_settled, read_records
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
            blank = [Record("bench", cell.as_json(), one.name, "", {}, {}, exits=pattern) for one in chosen]
            found = {one.variant: settled.get(one.key) for one in blank}
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


def run_bench(
    own_model: str | None, cells: list[Cell], *, variants: tuple[str, ...], exits: tuple[str, ...], rounds: int,
    out: Path | None, fresh: bool,
) -> None:  # fmt: skip
    """Measure and print: a user's model, or cells of ResNets; the others are the options of the command.

    Raises:
        BadInput: no CUDA device, no such factory, variant or exit pattern, or a cell that could not be measured.
        BadRecord: ``out`` cannot be read.
    """
    console = wide_console()

    def check(cells: Sequence[Cell]) -> None:
        check_globs("--variant", variants, (variant.name for cell in cells for variant in catalogue(cell)))
        check_patterns(exits, cells)

    networks = find_networks("bench", own_model, cells, out, option="--model", check=check)
    options = BenchOptions(networks.where, networks.environment, rounds, variants, fresh, exits)
    left, failed = unsettled(networks.cells, options), []
    with SweepProgress(console) as progress:
        for number, (cell, runs) in enumerate(left):
            begins = progress.of_network(cell, number, len(left))
            try:
                run_cell(networks.subject(cell), runs, options, begins)
            except DeviceLost as error:
                raise BadInput(f"{error}; it is recorded: the same command goes on with the rest") from None
            except (RuntimeError, ValueError) as error:  # no memory for the network itself, say
                failed.append(f"{cell}: {Failure.of(error).detail}")
                begins(f"FAILED: {Failure.of(error).detail}", 1.0)
    chosen = [cell.as_json() for cell in networks.cells]
    found = read_records(networks.where) if networks.where.exists() else []
    print_tables(console, bench_tables(record for record in found if record.cell in chosen), networks.where)
    if failed:
        raise BadInput(f"{len(failed)} of {len(left)} cells could not be measured, the first: {failed[0]}")
