"""Selects the variants and exit patterns that a run of the benchmark measures, less those already recorded."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..measuring.cells import Cell
from ..measuring.options import check_globs, chosen_patterns
from ..records.record import Record, is_settled, read_records
from .variants import Variant, bare_name, catalogue, segments_name, truncated_name


@dataclass(frozen=True)
class BenchOptions:
    """Options of a run of the benchmark: what it measures, and where records go."""

    out: Path
    environment: dict[str, Any]
    rounds: int
    wanted: tuple[str, ...] = ()
    """Globs of variant names; none: all that are measured by default."""
    fresh: bool = False
    """Measure again what is already recorded."""
    exits: tuple[str, ...] = ()
    """Globs of exit patterns; none: all of a cell."""


@dataclass
class PatternRun:
    """One exit pattern of one cell, whose variants are measured in one interleaved run."""

    cell: Cell
    pattern: str
    variants: list[Variant]
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    """Identifier shared by its records."""


def chosen_variants(cell: Cell, pattern: str, wanted: Sequence[str]) -> list[Variant]:
    """Return the variants asked for that run in that pattern, with the baselines of their ratios."""
    known = [variant for variant in catalogue(cell) if variant.runs(pattern)]
    asked = [
        variant
        for variant in known
        if (any(fnmatchcase(variant.name, glob) for glob in wanted) if wanted else variant.by_default)
    ]
    trunks = {variant.trunk for variant in asked}
    baselines = {name(trunk) for trunk in trunks for name in (bare_name, truncated_name, segments_name)}
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
