"""Runs ``auxhead-tune overlap``, network after network: records of a summary and of one replay, and their tables."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...model.basics.bad_input import BadInput
from ..measuring.cells import Cell
from ..measuring.environment import clocks, release_memory
from ..measuring.failures import Failure
from ..measuring.networks import find_networks
from ..measuring.options import NetworkChoice
from ..measuring.progress import SweepProgress
from ..measuring.timers import CAPTURES, FINAL_ROUNDS, PROTOCOL, VariantFailed
from ..records.record import Record, append_record
from ..records.summaries import as_json, percentiles, summary
from ..records.tables import print_tables, wide_console
from .footprints import FOOTPRINT, footprint_records, measure_footprints
from .measure import REPLAYS, OverlapMeasured, measure_overlap, paired_parts
from .metrics import KernelStretch, hiding_efficiency, kernel_stretches, median_replay, overlap_of, spreads
from .network_parts import BARE, BOTH, HEADS, TRUNK_KIND
from .replays import Replay
from .tables import footprint_tables, overlap_tables

#: The kinds of these records.
KIND, TIMELINE = "overlap", "timeline"
#: The variant of these records.
VARIANT = f"overlapped@{TRUNK_KIND}"


def overlap_records(cell: Cell, measured: OverlapMeasured, environment: dict[str, Any]) -> list[Record]:
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
    # the time of a capture under the profiler over its time without
    inflation = {name: median(measured.profiled[name]) / median(measured.times[name][0]) for name in (BARE, BOTH)}
    details = {
        **spreads([overlap_of(replay) for replay in replays]),
        "bare_span_us": percentiles([overlap_of(replay).span_us for replay in measured.replays[BARE]]),
        "hiding_efficiency": hiding_efficiency(trunk, heads, both),
        "inflation": inflation,
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
        Record(KIND, cell.as_json(), VARIANT, environment=environment, **timed, **common),
        Record(TIMELINE, cell.as_json(), VARIANT, environment=environment, measured=as_json(timeline), **common),
    ]


def failed_record(kind: str, cell: Cell, error: str, environment: dict[str, Any]) -> Record:
    """Return the record, of one of the command's kinds, of a network that could not be measured."""
    run, how = secrets.token_hex(6), {"trunk_kind": TRUNK_KIND}
    return Record(kind, cell.as_json(), VARIANT, run, environment, how, error=error)


def _span_us(replays: Sequence[Replay]) -> float:
    return median(overlap_of(replay).span_us for replay in replays)


def run_overlap(chosen: NetworkChoice, out: Path | None, *, footprints: bool) -> None:
    """Measure the networks chosen, or the footprints of their heads, and print tables of them.

    Raises:
        BadInput: no CUDA device, no such network, or one that could not be measured.
    """
    kind = FOOTPRINT if footprints else KIND
    console, networks = wide_console(), find_networks(kind, chosen.own, chosen.cells, out)
    found: list[Record] = []
    reasons: list[str] = []
    with SweepProgress(console) as progress:
        for number, cell in enumerate(networks.cells):
            begins = progress.of_network(cell, number, len(networks.cells))
            begins("building", 0.0)
            try:
                subject = networks.subject(cell)
                measured = measure_footprints(subject, begins) if footprints else measure_overlap(subject, begins)
            except (RuntimeError, ValueError) as error:  # no memory, a wrong answer, a trace that holds too little
                why = error.__cause__ if isinstance(error, VariantFailed) and error.__cause__ else error
                reasons.append(str(Failure.of(why)))
                records = [failed_record(kind, cell, reasons[-1], networks.environment)]
            else:
                around = {**networks.environment, "clocks": clocks(networks.device)}
                if isinstance(measured, OverlapMeasured):
                    records = overlap_records(cell, measured, around)
                else:
                    records = footprint_records(cell, measured, around)
            for record in records:
                append_record(networks.where, record)
            found += records
            release_memory()
    print_tables(console, (footprint_tables if footprints else overlap_tables)(found), networks.where)
    if reasons:
        count = f"{len(reasons)} of {len(networks.cells)}"
        raise BadInput(f"{count} networks could not be measured, the first: {reasons[0]}")
