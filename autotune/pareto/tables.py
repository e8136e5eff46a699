"""Tables of accuracy against time to the answer: one a network, a row for each set of thresholds and variant."""

from collections.abc import Iterable

from ..records.grouping import latest_by_network
from ..records.record import Record
from ..records.tables import RecordTable

#: The kind of these records.
KIND = "pareto"

COLUMNS = (
    "thresholds",
    "variant",
    "accuracy",
    "mean to the answer, us",
    "mean / bare",
    "median to the answer, us",
    "device, us",
)
_TEXT_COLUMNS = 2


def pareto_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return one table for each cell and environment, of the last measurement of each variant."""
    return [_table(group) for group in latest_by_network(records, KIND)]


def _table(records: list[Record]) -> RecordTable:
    cell, environment = records[0].cell, records[0].environment
    title = (
        f"{cell['model']} {cell['dtype']} on {records[0].protocol['data']}, batch {cell['batch']}; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}; host times"
    )
    failed = [f"{one.variant}, {one.exits}: {one.error}" for one in records if one.error is not None]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, [_row(one) for one in records], failed)


def _row(record: Record) -> tuple[str, ...]:
    measured, host, device = record.measured, record.host_us, record.device_us
    if measured is None or host is None or device is None:
        return (record.exits, record.variant, "failed", *["-"] * (len(COLUMNS) - 3))
    ratios = [f"{pair['mean_host_ratio']:.3f}" for pair in record.paired if pair["role"] == "bare"]
    return (
        record.exits,
        record.variant,
        f"{measured['accuracy']:.2%}",
        f"{measured['mean_host_us']:,.1f}",
        *(ratios or ["-"]),
        f"{host['median']:,.1f}",
        f"{device['median']:,.1f}",
    )
