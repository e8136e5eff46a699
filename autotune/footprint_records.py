"""Footprints on disk: a record each, all of a network in one run."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.spread import spread
from .cells import Cell
from .comparison import Timings, compare
from .footprint_timing import CAPTURES, RECORDED, REPLAYS, ROUNDS, FootprintsMeasured, Occupied, Variant
from .footprints import BY_RULE, Footprint
from .nsight_compute import Counted
from .occupancy import TIERS, Active, Resident
from .overlap import hiding_efficiency
from .overlap_parts import BARE, BOTH, HEADS
from .record import Record, utc_now
from .space import text
from .trunk_probe import HOLD_NS

#: The kind of these records.
KIND = "footprint"
#: Of microseconds and of shares; the smallest shares are of the order of 1e-4.
_DIGITS = 6


def footprint_records(
    cell: Cell, measured: FootprintsMeasured, counted: Counted, environment: Mapping[str, Any]
) -> list[Record]:
    """Return a record of each footprint of a network, what is by rule first.

    Args:
        cell: the network.
        measured: what was measured of it.
        counted: what Nsight Compute says of these footprints.
        environment: see :class:`~auxhead.autotune.record.Record`.
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
        found.append(_record(cell, footprint.name, environment, run=run, protocol=protocol, **rest))
    return found


def failed_record(cell: Cell, error: str, environment: Mapping[str, Any]) -> Record:
    """Return the record of a network that could not be measured."""
    return _record(cell, BY_RULE, environment, run=secrets.token_hex(6), protocol={}, error=error)


def _record(cell: Cell, variant: str, environment: Mapping[str, Any], **rest: Any) -> Record:
    return Record(
        kind=KIND,
        cell=cell.as_json(),
        exits="never",
        variant=variant,
        utc=utc_now(),
        environment=dict(environment),
        **rest,
    )


def _found(footprint: Footprint, measured: FootprintsMeasured, counted: Counted) -> dict[str, Any]:
    times = measured.times
    bare, both, heads = times[Variant(BARE)], times[Variant(BOTH, footprint)], times[Variant(HEADS, footprint)]
    stretch = compare(both, bare)
    interval = {"device_ratio": stretch.median_ratio, "low": stretch.low, "high": stretch.high}
    paired: list[dict[str, Any]] = [
        {"role": BARE, "device_us": _summary(bare), **interval},
        {"role": HEADS, "device_us": _summary(heads)},
    ]
    recorded = times.get(Variant(RECORDED, footprint))
    if recorded is not None:
        paired.append({"role": RECORDED, "device_us": _summary(recorded)})
    occupied = measured.occupied[footprint]
    details: dict[str, Any] = {
        "hiding_efficiency": _rounded(hiding_efficiency(bare, heads, both)._asdict()),
        "programs": occupied.programs,
        "occupancy": _tiers(occupied, counted.active.get(footprint)),
    }
    if footprint == measured.footprints[0]:
        room = {
            name: [round(one, 3) for one in value] if isinstance(value, list) else round(value, 3)
            for name, value in measured.room._asdict().items()
        }
        details["trunk_room"] = {"hold_us": HOLD_NS / 1e3, **room}
    notes = [] if counted.absent is None else [counted.absent]
    return {"device_us": _summary(both), "paired": paired, "measured": details, "notes": notes}


def _tiers(occupied: Occupied, active: Sequence[Active] | None) -> dict[str, Any]:
    """Return what is known of each tier."""
    residency = {
        name: _rounded(spread([float(getattr(one, name)) for one in occupied.residency])._asdict())
        for name in Resident._fields
    }
    found = {
        "theoretical": [_rounded(one._asdict()) for one in occupied.theoretical],
        "estimate": [one._asdict() for one in occupied.estimate],
        "residency": residency,
        "ncu": None if active is None else [one._asdict() for one in active],
    }
    return {tier: found[tier] for tier in TIERS}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in values.items()}


def _summary(timings: Timings) -> dict[str, Any]:
    overall = spread([us for rounds in timings for us in rounds])
    return {**_rounded(overall._asdict()), "captures": [round(spread(rounds).median, _DIGITS) for rounds in timings]}
