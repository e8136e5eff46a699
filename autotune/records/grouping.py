"""Groups records by network and environment for tables, and names each group in words."""

import json
from collections.abc import Iterable
from typing import Any

from .record import Record, latest


def latest_by_network(records: Iterable[Record], kind: str) -> list[list[Record]]:
    """Return the last record of each thing measured, of one kind, grouped by cell and environment."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in latest(record for record in records if record.kind == kind):
        groups.setdefault((json.dumps(record.cell, sort_keys=True), record.environment_key), []).append(record)
    return list(groups.values())


def network_in_words(record: Record) -> str:
    """Return the network, batch, heads and input of a record, its GPU and its torch, in one line."""
    cell, environment = record.cell, record.environment
    kind = f"{cell['heads']} " if "heads" in cell else ""
    return (
        f"{cell['model']} {cell['dtype']}, batch {cell['batch']}, {cell['classes']} classes, "
        f"{len(cell['taps'])} {kind}heads ({cell['placement']}), {'x'.join(map(str, cell['input']))}; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}"
    )
