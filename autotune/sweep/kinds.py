"""Times of the rule over those of tables' entries, alone, by kind of head: what a GPU without such a table loses."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...kernels.launch.choose_config import chosen_by_rule
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_rule import FEW_CLASSES
from ...kernels.launch.tuned_table import TunedTable
from ..records.decisions import Measurement, by_shape, of_last_kernel
from ..records.record import Record
from ..records.tables import RecordTable
from .search import Answers, shipped_tables
from .winners import launchable

#: What the rule may take of the time of a table's entry where it serves well enough by itself.
WELL = 1.1
_COLUMNS = ("features", "number", "median", "least", "most", f"up to {WELL}")


def kind_of(shape: HeadShape) -> str:
    """Name the kind of a head by its features and the number of its classes.

    A contiguous map that is not pooled is a vector, and so is a first token.
    """
    if shape.height == shape.width == 1:
        features = "vectors"
    elif (shape.grid_h, shape.grid_w) == (shape.height, shape.width):
        features = f"{shape.layout} maps, flattened"
    elif shape.pool == "max":
        features = "maxima"
    else:
        features = "means of all" if shape.grid_h == shape.grid_w == 1 else "means of windows"
    return f"{features}; {'up to' if shape.classes <= FEW_CLASSES else 'more than'} {FEW_CLASSES} classes"


def kind_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return for each environment and each shipped table a table by kind of head; none where no entry was measured."""
    tables = shipped_tables()
    heads: dict[tuple[Any, ...], dict[HeadShape, Answers]] = {}
    for (where, shape), its in _timed(records).items():
        heads.setdefault(where, {})[shape] = _times(map(launchable, its))
    found = [_kind_table(where[0], measured, table) for where, measured in heads.items() for table in tables]
    return [one for one in found if one.rows]


def _timed(records: Iterable[Record]) -> dict[tuple[tuple[Any, ...], HeadShape], list[Record]]:
    """Group what was timed with the last kernel, by environment and head."""
    found: dict[tuple[tuple[Any, ...], HeadShape], list[Record]] = {}
    for shape, its in by_shape(of_last_kernel(records)).items():
        for record in its:
            if record.error is None:
                found.setdefault((record.environment_key, HeadShape(*shape)), []).append(record)
    return found


def _times(measured: Iterable[Measurement]) -> Answers:
    """Return times beside the rule that was measured last; of a configuration timed several times, of the most rounds.

    A winner is decided by those alone that were timed most often; the rule may since have another one, only looked at.
    """
    by_rounds = sorted(found := list(measured), key=lambda one: one.rounds)
    return {one.config: one.paired for one in by_rounds if one.rule == found[-1].rule}


def _kind_table(gpu: object, heads: Mapping[HeadShape, Answers], table: TunedTable) -> RecordTable:
    ratios: dict[str, list[float]] = {}
    unknown = 0
    for shape, times in heads.items():
        entry, rule = table.find(shape), chosen_by_rule(shape)
        if entry is not None and entry.config in times and rule in times:
            ratios.setdefault(kind_of(shape), []).append(times[rule].over_baseline / times[entry.config].over_baseline)
        else:
            unknown += entry is not None
    rows = [_row(kind, of_kind) for kind, of_kind in sorted(ratios.items())]
    every = [ratio for of_kind in ratios.values() for ratio in of_kind]
    title = f"On {gpu}: the rule's time over that of the entries of the table of {table.device}"
    remarks = [f"Left out: {unknown} heads whose entry or rule's configuration was not measured"] if unknown else []
    return RecordTable(title, _COLUMNS, 1, [*rows, _row("all", every)] if every else [], remarks)


def _row(kind: str, ratios: Sequence[float]) -> tuple[str, ...]:
    numbers = (f"{one:.2f}" for one in (statistics.median(ratios), min(ratios), max(ratios)))
    return (kind, str(len(ratios)), *numbers, f"{sum(one <= WELL for one in ratios) / len(ratios):.0%}")
