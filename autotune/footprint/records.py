"""Records of footprints: one each, all of a network in one run."""

import secrets
from collections.abc import Mapping
from typing import Any

from ..measuring.cells import Cell
from ..measuring.occupancy import TIERS, MeasuredResidency
from ..measuring.timers import PROTOCOL
from ..overlap.captured_parts import BARE, BOTH, HEADS
from ..overlap.metrics import hiding_efficiency
from ..overlap.records import paired_parts
from ..records.record import Record
from ..records.summaries import as_json, network_record, percentiles, summary
from ..sweep.config_text import text
from .launch_variations import BY_RULE, Footprint
from .measure import CAPTURES, RECORDED, REPLAYS, ROUNDS, FootprintOccupancy, FootprintsMeasured, TimedPart

#: The kind of these records.
KIND = "footprint"


def footprint_records(cell: Cell, measured: FootprintsMeasured, environment: Mapping[str, Any]) -> list[Record]:
    """Return a record of each footprint of a network, the one by rule first."""
    run = secrets.token_hex(6)
    how = {
        "captures": CAPTURES,
        "rounds": ROUNDS,
        "repeat": measured.repeat,
        "residency_replays": REPLAYS,
        **PROTOCOL,
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
            rest = _found(footprint, measured)
        found.append(
            network_record(KIND, cell.as_json(), footprint.name, environment, run=run, protocol=protocol, **rest)
        )
    return found


def failed_record(cell: Cell, error: str, environment: Mapping[str, Any]) -> Record:
    """Return the record of a network that could not be measured."""
    return network_record(
        KIND, cell.as_json(), BY_RULE, environment, run=secrets.token_hex(6), protocol={}, error=error
    )


def _found(footprint: Footprint, measured: FootprintsMeasured) -> dict[str, Any]:
    times = measured.times
    bare, both, heads = times[TimedPart(BARE)], times[TimedPart(BOTH, footprint)], times[TimedPart(HEADS, footprint)]
    paired = paired_parts(bare, heads, both)
    recorded = times.get(TimedPart(RECORDED, footprint))
    if recorded is not None:
        paired.append({"role": RECORDED, "device_us": summary(recorded)})
    occupied = measured.occupied[footprint]
    details: dict[str, Any] = {
        "hiding_efficiency": hiding_efficiency(bare, heads, both),
        "programs": occupied.programs,
        "occupancy": _tiers(occupied),
    }
    timed: dict[str, Any] = as_json({"device_us": summary(both), "paired": paired, "measured": details})
    return timed


def _tiers(occupied: FootprintOccupancy) -> dict[str, Any]:
    """Return the occupancy of each tier."""
    found = {
        "theoretical": occupied.theoretical,
        "estimate": occupied.estimate,
        "residency": {
            name: percentiles([float(getattr(one, name)) for one in occupied.residency])
            for name in MeasuredResidency._fields
        },
    }
    return {tier: found[tier] for tier in TIERS}
