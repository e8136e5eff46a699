"""Records of overlap: a summary of each network, and the kernels of one of its replays."""

import secrets
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..measuring.cells import Cell
from ..measuring.timers import CAPTURES, FINAL_ROUNDS, PROTOCOL
from ..records.comparison import compare
from ..records.record import Record
from ..records.summaries import Timings, as_json, network_record, percentiles, summary
from .measure import BARE, BOTH, HEADS, REPLAYS, TRUNK_KIND, OverlapMeasured
from .metrics import KernelStretch, hiding_efficiency, kernel_stretches, median_replay, overlap_of, spreads
from .replays import Replay

#: The kinds of these records.
KIND, TIMELINE = "overlap", "timeline"
#: The variant of these records.
VARIANT = f"overlapped@{TRUNK_KIND}"


def overlap_records(cell: Cell, measured: OverlapMeasured, environment: Mapping[str, Any]) -> list[Record]:
    """Return the summary and the timeline of one network, two records of one run."""
    replays = measured.replays[BOTH]
    # the replay shown is one whose heads recorded their programs, so that all of it is of one replay
    index = median_replay([one.replay for one in measured.recorded])
    drawn, programs, clocks_differ_us = measured.recorded[index]
    recording = _span_us([one.replay for one in measured.recorded]) / _span_us(replays)
    notes = list(measured.notes)
    kernels: list[KernelStretch] = []
    try:
        kernels = kernel_stretches(measured.replays[BARE], replays)
    except ValueError as error:
        notes.append(f"No stretch by kernel: {error}.")
    trunk, heads, both = (measured.times[part] for part in (BARE, HEADS, BOTH))
    details = {
        **spreads([overlap_of(replay) for replay in replays]),
        "bare_span_us": percentiles([overlap_of(replay).span_us for replay in measured.replays[BARE]]),
        "hiding_efficiency": hiding_efficiency(trunk, heads, both),
        "inflation": {name: _inflation(measured, name) for name in (BARE, BOTH)},
        "kernels": kernels,
    }
    timeline = {
        "replay": index + 1,
        **overlap_of(drawn)._asdict(),
        "coverage": overlap_of(drawn).coverage,
        "kernels": drawn,
        "programs": [list(program) for program in programs],
        "clocks_differ_us": clocks_differ_us,
        "recording_inflation": recording,
    }
    how = {
        "captures": CAPTURES,
        "rounds": FINAL_ROUNDS,
        "repeat": measured.repeat,
        "replays": REPLAYS,
        "trunk_kind": TRUNK_KIND,
        "forks": list(measured.forks),
        **PROTOCOL,
    }
    common: dict[str, Any] = {"run": secrets.token_hex(6), "protocol": how, "notes": notes}
    timed = as_json({"device_us": summary(both), "paired": paired_parts(trunk, heads, both), "measured": details})
    return [
        network_record(KIND, cell.as_json(), VARIANT, environment, **timed, **common),
        network_record(TIMELINE, cell.as_json(), VARIANT, environment, measured=as_json(timeline), **common),
    ]


def paired_parts(trunk: Timings, heads: Timings, both: Timings) -> list[dict[str, Any]]:
    """Return the parts that a network is compared with, its trunk and its heads; see ``hiding_efficiency``."""
    stretch = compare(both, trunk)
    interval = {"device_ratio": stretch.median_ratio, "low": stretch.low, "high": stretch.high}
    return [
        {"role": BARE, "device_us": summary(trunk), **interval},
        {"role": HEADS, "device_us": summary(heads)},
    ]


def failed_record(kind: str, cell: Cell, error: str, environment: Mapping[str, Any]) -> Record:
    """Return the record, of one of the command's kinds, of a network that could not be measured."""
    run, how = secrets.token_hex(6), {"trunk_kind": TRUNK_KIND}
    return network_record(kind, cell.as_json(), VARIANT, environment, run=run, protocol=how, error=error)


def _inflation(measured: OverlapMeasured, part: str) -> float:
    """The time of a capture under the profiler over its time without."""
    return statistics.median(measured.profiled[part]) / statistics.median(measured.times[part][0])


def _span_us(replays: Sequence[Replay]) -> float:
    return statistics.median(overlap_of(replay).span_us for replay in replays)
