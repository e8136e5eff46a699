"""What sweeps found, from their records alone."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..measuring.targets import ALONE, NETWORK, Target
from ..records.decisions import of_last_kernel
from ..records.record import BadRecord, Record
from .decisive import decisive, measurement
from .outcome import Outcome, outcome
from .records import shape_of, sweep_records
from .space import parse, text


def recorded_outcomes(records: Iterable[Record]) -> list[tuple[str, list[Outcome]]]:
    """Return, with a title, what the kernel that was swept last found in each network, data type, batch and classes.

    Raises:
        BadRecord: a record of a sweep that lacks something.
    """
    alone: dict[str, list[Record]] = {}
    networks: dict[str, dict[Target, list[Record]]] = {}
    for record in of_last_kernel(sweep_records(records)):
        try:
            shape, where = shape_of(record), _where(record)
        except KeyError as error:
            raise BadRecord(f"{record.variant}: {error.args[0]}: missing in a record of a sweep") from None
        if record.protocol["place"] == ALONE:
            alone.setdefault(_key(*where, shape), []).append(record)
        else:
            target = Target(shape, record.cell["model"], tuple(record.cell["tap"].split(", ")))
            network = (record.protocol.get("trunk"), target.model, shape.samples, shape.dtype, shape.classes)
            networks.setdefault(_key(*where, *network), {}).setdefault(target, []).append(record)
    found = []
    for targets in networks.values():
        first = next(iter(targets.values()))[0]
        outcomes = [
            _outcome(target, {ALONE: alone.get(_key(*_where(first), target.shape), []), NETWORK: its})
            for target, its in targets.items()
        ]
        found.append((_title(first), outcomes))
    return found


def _where(record: Record) -> tuple[Any, ...]:
    """Return what times alone depend on, beside the shape."""
    return (*record.environment_key, record.environment.get("sm_count"), record.protocol["kernel"])


def _key(*parts: Any) -> str:
    return json.dumps(parts)


def _title(record: Record) -> str:
    cell, environment = record.cell, record.environment
    return (
        f"{cell['model']} {cell['dtype']}, batch {cell['samples']}, {cell['classes']} classes; "
        f"{environment.get('gpu')}, torch {environment.get('torch')}, kernel {record.protocol['kernel']}"
    )


def _outcome(target: Target, places: Mapping[str, Sequence[Record]]) -> Outcome:
    try:
        measured = {place: [measurement(one) for one in its if one.error is None] for place, its in places.items()}
        rule = measured[NETWORK][-1].rule if measured[NETWORK] else text(target.rule)
        answers = {
            place: {config: one.paired for config, one in decisive(one for one in found if one.rule == rule).items()}
            for place, found in measured.items()
        }
        baseline = parse(rule)
    except ValueError as error:
        raise BadRecord(f"{target}: {error}") from None
    failed = {(place, one.variant): one.error for place, its in places.items() for one in its if one.error is not None}
    return outcome(target, baseline, answers, Counter(error.partition(": ")[0] for error in failed.values()))
