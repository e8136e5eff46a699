"""Overlap on disk: a summary of each network measured, and the kernels of one of its replays."""

import secrets
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..model.spread import Spread, spread
from .cells import Cell
from .comparison import Timings, compare
from .overlap import hiding_efficiency, kernel_stretches, median_replay, overlap_of, spreads
from .overlap_measurement import REPLAYS, OverlapMeasured
from .overlap_parts import BARE, BOTH, HEADS, TRUNK_KIND
from .record import Record, utc_now
from .replays import Kernel, Replay
from .search import FINAL_ROUNDS
from .timing import CAPTURES

#: The kinds of these records.
KIND, TIMELINE = "overlap", "timeline"
#: What is measured.
VARIANT = f"overlapped@{TRUNK_KIND}"
#: Of microseconds and of shares: the profiler counts nanoseconds.
_DIGITS = 4


def overlap_records(cell: Cell, measured: OverlapMeasured, environment: Mapping[str, Any]) -> list[Record]:
    """Return the summary and the timeline of one network, two records of one run.

    Args:
        cell: the network.
        measured: what was measured of it.
        environment: see :class:`~auxhead.autotune.record.Record`.
    """
    replays = measured.replays[BOTH]
    # shown is one whose heads recorded their programs, so that all of it is of one replay
    place = median_replay([one.replay for one in measured.recorded])
    drawn, programs, clocks_differ_us = measured.recorded[place]
    recording = _span_us([one.replay for one in measured.recorded]) / _span_us(replays)
    notes = list(measured.notes)
    kernels: list[dict[str, Any]] = []
    try:
        stretches = kernel_stretches(measured.replays[BARE], replays)
        kernels = [{"name": one.name, "bare_us": one.bare_us, "both_us": one.both_us} for one in stretches]
    except ValueError as error:
        notes.append(f"No stretch by kernel: {error}.")
    stretch = compare(measured.times[BOTH], measured.times[BARE])
    interval = {"device_ratio": stretch.median_ratio, "low": stretch.low, "high": stretch.high}
    pairs = [{"role": role, "device_us": _summary(measured.times[role])} for role in (BARE, HEADS)]
    details = {
        **{name: _spread(found) for name, found in spreads([overlap_of(replay) for replay in replays]).items()},
        "bare_span_us": _spread(spread([overlap_of(replay).span_us for replay in measured.replays[BARE]])),
        "hiding_efficiency": _spread(hiding_efficiency(*(measured.times[part] for part in (BARE, HEADS, BOTH)))),
        "inflation": {name: _inflation(measured, name) for name in (BARE, BOTH)},
        "kernels": kernels,
    }
    of_replay = overlap_of(drawn)
    timeline = {
        "replay": place + 1,
        **{name: round(value, _DIGITS) for name, value in of_replay._asdict().items()},
        "coverage": None if of_replay.coverage is None else round(of_replay.coverage, _DIGITS),
        "kernels": [_as_json(kernel) for kernel in drawn],
        "programs": [list(program) for program in programs],
        "clocks_differ_us": clocks_differ_us,
        "recording_inflation": round(recording, _DIGITS),
    }
    how = {
        "captures": CAPTURES,
        "rounds": FINAL_ROUNDS,
        "repeat": measured.repeat,
        "replays": REPLAYS,
        "trunk_kind": TRUNK_KIND,
        "forks": list(measured.forks),
        "order": "interleaved, shuffled every round",
        "l2": "warm, by the variant itself",
        "clocks": "as found",
    }
    common = {"run": secrets.token_hex(6), "protocol": how, "notes": notes}
    summary = _summary(measured.times[BOTH])
    paired = [{**pairs[0], **interval}, pairs[1]]
    return [
        _record(KIND, cell, environment, device_us=summary, paired=paired, measured=details, **common),
        _record(TIMELINE, cell, environment, measured=timeline, **common),
    ]


def failed_record(cell: Cell, error: str, environment: Mapping[str, Any]) -> Record:
    """Return the record of a network that could not be measured."""
    return _record(KIND, cell, environment, run=secrets.token_hex(6), protocol={"trunk_kind": TRUNK_KIND}, error=error)


def _record(kind: str, cell: Cell, environment: Mapping[str, Any], **rest: Any) -> Record:
    return Record(
        kind=kind,
        cell=cell.as_json(),
        exits="never",
        variant=VARIANT,
        utc=utc_now(),
        environment=dict(environment),
        **rest,
    )


def _as_json(kernel: Kernel) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in kernel._asdict().items()}


def _spread(found: Spread | None) -> dict[str, float] | None:
    return None if found is None else {name: round(value, _DIGITS) for name, value in found._asdict().items()}


def _summary(timings: Timings) -> dict[str, Any]:
    overall = _spread(spread([us for rounds in timings for us in rounds])) or {}
    return {**overall, "captures": [round(_median(rounds), _DIGITS) for rounds in timings]}


def _inflation(measured: OverlapMeasured, part: str) -> float:
    """The time of a capture under the profiler over its time without."""
    return round(_median(measured.profiled[part]) / _median(measured.times[part][0]), _DIGITS)


def _span_us(replays: Sequence[Replay]) -> float:
    return statistics.median(overlap_of(replay).span_us for replay in replays)


def _median(rounds: Sequence[float]) -> float:
    return statistics.median(rounds)
