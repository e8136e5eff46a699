"""Tables of what sweeps found about whole networks: forks, and the trunk's priority."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..heads.forks import NetworkPoint
from ..measuring.cells import Cell
from ..records.comparison import Paired
from ..records.record import BadRecord, Record
from ..records.tables import RecordTable
from .network_sweep import NetworkOutcome
from .records import NETWORK_KIND, result_of
from .tables import ratio_in_words

#: Of every table.
COLUMNS = ("network", "by rule", "winner", "its time / by rule's", "time with same priority / by rule's")
#: How many of them are text.
_TEXT_COLUMNS = 3


def network_table(title: str, outcomes: Sequence[NetworkOutcome]) -> RecordTable:
    """Return a table, a network a row, with the count of all below."""
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, [_row(one) for one in outcomes], [_summary(outcomes)])


def network_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for each environment and kernel; of a network that was swept more than once the last sweep counts.

    A sweep is another one if the heads are launched otherwise, or something else is by rule.

    Raises:
        BadRecord: what is by rule is missing.
    """
    groups: dict[tuple[Any, ...], dict[str, list[Record]]] = {}
    for record in records:
        if record.kind == NETWORK_KIND:
            group = groups.setdefault((*record.environment_key, record.protocol["kernel"]), {})
            group.setdefault(json.dumps(record.cell), []).append(record)
    return [
        network_table(_title(next(iter(group.values()))[0]), [_outcome(its) for its in group.values()])
        for group in groups.values()
    ]


def _title(record: Record) -> str:
    environment = record.environment
    where = f"{environment.get('gpu')}, torch {environment.get('torch')}, kernel {record.protocol['kernel']}"
    return f"Where launches leave the trunk; {where}"


def _outcome(records: Sequence[Record]) -> NetworkOutcome:
    found = {_point(one): result_of(one) for one in records if _of_sweep(one) == _of_sweep(records[-1])}
    by_name = {str(point): point for point in found}
    rule = records[-1].protocol["rule"]
    if rule not in by_name:
        raise BadRecord(f"{records[-1].variant}: rule: got no record of {rule}, wants what it was timed beside")
    times = {point: result for point, result in found.items() if isinstance(result, Paired)}
    return NetworkOutcome(Cell.from_json(records[-1].cell), by_name[rule], times)


def _of_sweep(record: Record) -> tuple[Any, ...]:
    return tuple(record.protocol[name] for name in ("trunk", "heads", "rule"))


def _point(record: Record) -> NetworkPoint:
    return NetworkPoint(tuple(record.protocol["forks"]), record.protocol["trunk_priority"] == "high")


def _row(found: NetworkOutcome) -> tuple[str, ...]:
    winner = found.winner
    same = found.over_rule(found.by_rule._replace(trunk_first=False))
    return (
        str(found.cell),
        str(found.by_rule),
        "-" if winner is None else "no difference" if winner == found.by_rule else str(winner),
        ratio_in_words(None if winner is None else found.over_rule(winner), winner == found.by_rule),
        ratio_in_words(same, False),
    )


def _summary(outcomes: Sequence[NetworkOutcome]) -> str:
    faster = sum(one.winner not in (None, one.by_rule) for one in outcomes)
    priorities = [one.over_rule(one.by_rule._replace(trunk_first=False)) for one in outcomes]
    compared = [one for one in priorities if one is not None]
    slower = sum(not one.is_tie and one.median_ratio > 1.0 for one in compared)
    ties = sum(one.is_tie for one in compared)
    return (
        f"Of {len(outcomes)} networks other forks or the same priority are faster in {faster}. With the same priority "
        f"{slower} of {len(compared)} are slower, {ties} no different, {len(compared) - slower - ties} faster."
    )
