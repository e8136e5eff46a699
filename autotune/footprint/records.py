"""Footprints on disk: a record each, all of a network in one run."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..measuring.cells import Cell
from ..measuring.occupancy import TIERS, Active, Resident
from ..overlap.parts import BARE, BOTH, HEADS
from ..overlap.summary import hiding_efficiency
from ..records.comparison import compare
from ..records.record import Record
from ..records.spread import spread
from ..records.summaries import as_json, network_record, summary
from ..sweep.config_text import text
from .footprints import BY_RULE, Footprint
from .measure import CAPTURES, RECORDED, REPLAYS, ROUNDS, FootprintsMeasured, Occupied, Variant
from .nsight_compute import Counted
from .trunk_probe import HOLD_NS

#: The kind of these records.
KIND = "footprint"


def footprint_records(
    cell: Cell, measured: FootprintsMeasured, counted: Counted, environment: Mapping[str, Any]
) -> list[Record]:
    """Return a record of each footprint of a network, what is by rule first.

    Args:
        cell: the network.
        measured: what was measured of it.
        counted: what Nsight Compute says of these footprints.
        environment: see :class:`~auxhead.autotune.records.record.Record`.
    """
    run = secrets.token_hex(6)
    how = {
        "captures": CAPTURES,
        "rounds": ROUNDS,
        "repeat": measured.repeat,
        "residency_replays": REPLAYS,
        "order": "interleaved, shuffled every round",
        "l2": "warm, by the variant itself",
        "clocks": "as found",
        **measured.protocol,
    }
    found = []
    for footprint in measured.footprints:
        protocol = {
            **how,
            "trunk_priority": "high" if footprint.point.trunk_first else "same",
            "heads": {tap: text(dict(footprint.configs)[shape]) for tap, shape in measured.shapes.items()},
        }
        if footprint in measured.failed:
            rest: dict[str, Any] = {"error": str(measured.failed[footprint])}
        else:
            rest = _found(footprint, measured, counted)
        found.append(
            network_record(KIND, cell.as_json(), footprint.name, environment, run=run, protocol=protocol, **rest)
        )
    return found


def failed_record(cell: Cell, error: str, environment: Mapping[str, Any]) -> Record:
    """Return the record of a network that could not be measured."""
    return network_record(
        KIND, cell.as_json(), BY_RULE, environment, run=secrets.token_hex(6), protocol={}, error=error
    )


def _found(footprint: Footprint, measured: FootprintsMeasured, counted: Counted) -> dict[str, Any]:
    times = measured.times
    bare, both, heads = times[Variant(BARE)], times[Variant(BOTH, footprint)], times[Variant(HEADS, footprint)]
    stretch = compare(both, bare)
    interval = {"device_ratio": stretch.median_ratio, "low": stretch.low, "high": stretch.high}
    paired: list[dict[str, Any]] = [
        {"role": BARE, "device_us": summary(bare), **interval},
        {"role": HEADS, "device_us": summary(heads)},
    ]
    recorded = times.get(Variant(RECORDED, footprint))
    if recorded is not None:
        paired.append({"role": RECORDED, "device_us": summary(recorded)})
    occupied = measured.occupied[footprint]
    details: dict[str, Any] = {
        "hiding_efficiency": hiding_efficiency(bare, heads, both),
        "programs": occupied.programs,
        "occupancy": _tiers(occupied, counted.active.get(footprint)),
    }
    if footprint == measured.footprints[0]:
        details["trunk_room"] = {"hold_us": HOLD_NS / 1e3, **measured.room._asdict()}
    notes = [] if counted.absent is None else [counted.absent]
    return {**as_json({"device_us": summary(both), "paired": paired, "measured": details}), "notes": notes}


def _tiers(occupied: Occupied, active: Sequence[Active] | None) -> dict[str, Any]:
    """Return what is known of each tier."""
    found = {
        "theoretical": occupied.theoretical,
        "estimate": occupied.estimate,
        "residency": {
            name: spread([float(getattr(one, name)) for one in occupied.residency]) for name in Resident._fields
        },
        "ncu": active,
    }
    return {tier: found[tier] for tier in TIERS}
