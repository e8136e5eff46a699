"""Winners of heads by the records of sweeps; and tables of them, and of what a GPU without such a table loses."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...kernels.launch.choose_config import chosen_by_rule
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import FEW_CLASSES
from ...kernels.launch.tuned_table import TunedTable, config_from
from ..measuring.timers import CAPTURES
from ..records.comparison import DECIDING, Difference, tie
from ..records.decisions import Decision, Measurement, by_shape, deciding, measurement, of_last_kernel, sweep_records
from ..records.record import Record, bad_record, grouped
from ..records.tables import RecordTable
from .config_text import changes, text
from .search import Answers, shipped_tables


class HeadWinner(NamedTuple):
    """The winner of one head."""

    shape: HeadShape
    rule: LaunchConfig
    """The baseline of all times."""
    config: LaunchConfig | None
    """The winner; None if nothing could be measured."""
    over_rule: Difference | None
    """Its times against those of the rule's configuration."""

    @classmethod
    def of(cls, shape: HeadShape, decided: Decision[LaunchConfig]) -> "HeadWinner":
        """Take over what was decided."""
        return cls(shape, decided.rule, decided.winner, decided.compare(decided.winner, decided.rule))


#: Configurations by how records write them: a sweep has each of them many times, and a check takes 30 us.
_configs: dict[tuple[str, HeadShape], LaunchConfig] = {}


def launchable(record: Record) -> Measurement:
    """Read the record of something that was timed, its configuration as one that can be launched.

    Raises:
        BadRecord: names file, line and what the record lacks.
    """
    found, shape = measurement(record), shape_of(record)
    written = repr(found.config), shape
    if written not in _configs:
        try:
            _configs[written] = config_from(found.config, shape)
        except ValueError as error:
            raise bad_record(record, f"protocol: {error}") from None
    return found._replace(config=_configs[written])


def shape_of(record: Record) -> HeadShape:
    """Return the shape of the head that a sweep's record is about."""
    return HeadShape(**{name: record.cell[name] for name in HeadShape._fields})


def recorded_winners(records: Iterable[Record]) -> list[tuple[str, list[HeadWinner]]]:
    """Return the winners of the kernel that was swept last, by shape, with a title for each environment.

    Raises:
        BadRecord: a record of a sweep that lacks something.
    """
    by_environment = grouped(
        of_last_kernel(records), lambda one: (*one.environment_key, one.environment.get("sm_count"))
    )
    found = []
    for its in by_environment.values():
        heads = sorted(by_shape(its).items(), key=lambda head: (head[0][1:], head[0][0]))
        found.append((_title(its[-1]), [_winner(HeadShape(*shape), measured) for shape, measured in heads]))
    return found


def _title(record: Record) -> str:
    environment = record.environment
    where = f"{environment.get('gpu')}, torch {environment.get('torch')}, kernel {record.protocol['kernel']}"
    return f"Heads, each alone; {where}"


def _winner(shape: HeadShape, records: Sequence[Record]) -> HeadWinner:
    """Decide by records of one head, beside the rule's configuration as it was at the last of them."""
    measured = [launchable(one) for one in records if one.error is None]
    rules = [one.config for one in measured if one.variant == measured[-1].rule]
    times = {one.config: one.paired for one in deciding(measured)}
    return HeadWinner.of(shape, Decision(times, rules[0] if rules else chosen_by_rule(shape)))


COLUMNS = ("head", "rule when measured", "winner", "outcome", "its time / rule's")
#: Number of them that are text.
_TEXT_COLUMNS = 4


def sweep_tables(records: Sequence[Record]) -> list[RecordTable]:
    """Return tables of the winners by records, one for each environment; and of what the rule loses to tables."""
    tables = winner_tables(recorded_winners(records))
    if tables:
        tables[-1].remarks.extend(self_comparison(records))
    return [*tables, *kind_tables(records)]


def winner_tables(found: Sequence[tuple[str, Sequence[HeadWinner]]]) -> list[RecordTable]:
    """Return a table for each title and the winners under it, a head a row.

    Winners are told by what of the rule's configuration they change.
    """
    return [RecordTable(title, COLUMNS, _TEXT_COLUMNS, [*map(_row, winners)], []) for title, winners in found]


def _row(found: HeadWinner) -> tuple[str, ...]:
    config, rule, over_rule = found.config, found.rule, found.over_rule
    if config is None or over_rule is None:
        return (str(found.shape), text(rule), "-", "failed", "-")
    if config == rule:
        return (str(found.shape), text(rule), "as by rule", "tie", "the same")
    ratio = f"{over_rule.median_ratio:.3f} ({over_rule.low:.3f}-{over_rule.high:.3f})"
    ratio += ", no difference" if over_rule.is_tie else ""
    return (str(found.shape), text(rule), changes(config, rule), "win", ratio)


def self_comparison(records: Iterable[Record]) -> list[str]:
    """Return a line with the count of often captured configurations that look different from themselves (A/A).

    Each one's first captures are compared with its last ones, as two configurations are that were captured as often.
    A difference there is chance; there is no line where nothing was captured twice ``CAPTURES`` times.
    """
    compared = differing = 0
    for record in sweep_records(records):
        captures = (record.device_us or {}).get("samples", [])
        half = len(captures) // 2
        if half >= CAPTURES:
            compared += 1
            differing += not tie(captures[:half], captures[half:], confidence=DECIDING)
    if not compared:
        return []
    return [
        f"A/A: of {compared:,} configurations {differing} ({differing / compared:.2%}) look different from themselves, "
        f"the first half of their captures against the second."
    ]


#: What the rule may take of the time of a table's entry where it serves well enough by itself.
WELL = 1.1
_KIND_COLUMNS = ("features", "number", "median", "least", "most", f"up to {WELL}")


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
    timed = [one for one in of_last_kernel(records) if one.error is None]
    heads = {
        where: {HeadShape(*shape): _times(of_head) for shape, of_head in by_shape(its).items()}
        for where, its in grouped(timed, lambda one: one.environment_key).items()
    }
    tables = shipped_tables()
    found = [_kind_table(where[0], measured, table) for where, measured in heads.items() for table in tables]
    return [one for one in found if one.rows]


def _times(records: Iterable[Record]) -> Answers:
    """Return times beside the rule that was measured last; of a configuration timed several times, of the most rounds.

    A winner is decided by those alone that were timed most often; the rule may since have another one, only looked at.
    """
    by_rounds = sorted(found := [*map(launchable, records)], key=lambda one: one.rounds)
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
    rows = [_kind_row(kind, of_kind) for kind, of_kind in sorted(ratios.items())]
    every = [ratio for of_kind in ratios.values() for ratio in of_kind]
    title = f"On {gpu}: the rule's time over that of the entries of the table of {table.device}"
    remarks = [f"Left out: {unknown} heads whose entry or rule's configuration was not measured"] if unknown else []
    return RecordTable(title, _KIND_COLUMNS, 1, [*rows, _kind_row("all", every)] if every else [], remarks)


def _kind_row(kind: str, ratios: Sequence[float]) -> tuple[str, ...]:
    numbers = (f"{one:.2f}" for one in (statistics.median(ratios), min(ratios), max(ratios)))
    return (kind, str(len(ratios)), *numbers, f"{sum(one <= WELL for one in ratios) / len(ratios):.0%}")
