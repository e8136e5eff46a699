"""Winners of heads by the records of sweeps; and tables of them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...kernels.launch.choose_config import chosen_by_rule
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.tuned_table import config_from
from ..measuring.timers import CAPTURES
from ..records.comparison import DECIDING, Difference, tie
from ..records.decisions import Decision, Measurement, by_shape, deciding, measurement, of_last_kernel, sweep_records
from ..records.record import Record, bad_record, grouped
from ..records.tables import RecordTable
from .config_text import changes, text
from .search import decision


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
    return HeadWinner.of(shape, decision(rules[0] if rules else chosen_by_rule(shape), times))


COLUMNS = ("head", "rule when measured", "winner", "outcome", "its time / rule's")
#: Number of them that are text.
_TEXT_COLUMNS = 4


def sweep_tables(records: Sequence[Record]) -> list[RecordTable]:
    """Return the tables of winners by records, one for each environment; none if there are no records of sweeps."""
    tables = winner_tables(recorded_winners(records))
    if tables:
        tables[-1].remarks.extend(self_comparison(records))
    return tables


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
