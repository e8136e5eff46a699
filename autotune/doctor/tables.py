"""Tables of diagnoses: one an environment, a row for each with its verdict and findings."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..records.record import Record, grouped
from ..records.tables import RecordTable

COLUMNS = ("target", "findings", "a request, us", "trunk (t1), us", "the rest (t2), us", "both at once, us")
_TEXT_COLUMNS = 2


def doctor_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for each environment, of all its diagnoses: one target may have been changed between two."""
    found = (record for record in records if record.kind == "doctor" and record.error is None)
    return [_table(group) for group in grouped(found, lambda record: record.environment_key).values()]


def _table(records: Sequence[Record]) -> RecordTable:
    environment = records[0].environment
    title = f"Diagnoses on {environment.get('gpu')}, torch {environment.get('torch')}"
    rows = [_row(one.cell["target"], one.measured or {}) for one in records]
    remark = "together: all that ran, of which nothing is told from the trunk"
    remarks = [] if all((one.measured or {})["side_us"] for one in records) else [remark]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, rows, remarks)


def _row(target: str, measured: dict[str, Any]) -> tuple[str, ...]:
    found = ", ".join(dict.fromkeys(one["kind"] for one in measured["findings"])) or "none"
    trunk = f"{measured['trunk_us']:,.1f}"
    parts = (trunk, f"{measured['side_us']:,.1f}") if measured["side_us"] else (f"{trunk} together", "-")
    return (target, found, f"{measured['achieved_us']:,.1f}", *parts, f"{measured['overlapped_us']:,.1f}")
