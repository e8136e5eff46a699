"""Tables of a sweep's records: winners of heads, how many of them only noise chose, and where launches leave trunks."""

from collections.abc import Sequence

from ..records.record import Record
from ..records.tables import RecordTable
from .false_winners import false_winners
from .network_tables import network_tables
from .recorded_outcomes import recorded_outcomes
from .tables import outcome_tables


def sweep_tables(records: Sequence[Record]) -> list[RecordTable]:
    """Return the tables of all sweeps among the records."""
    tables = outcome_tables(recorded_outcomes(records))
    if tables:
        tables[-1].remarks.extend(false_winners(records))
    return tables + network_tables(records)
