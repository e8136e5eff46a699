"""From the records of sweeps to the tuned table of a device."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from ...kernels.head_shape import HeadShape
from ...kernels.kernel_hash import kernel_hash
from ...kernels.launch_config import LaunchConfig
from ...kernels.launch_rule import config_by_rule
from ...kernels.tuned_table import (
    PLACES,
    VERSIONS,
    BadTable,
    Entry,
    TunedTable,
    read_table,
    shape_from,
    table_path,
)
from ..records.comparison import compare_runs, over_baseline, winner
from ..records.decisions import times
from ..records.record import BadRecord, Record, read_records
from ..sweep.decisive import Measurement, decisive, measurement
from ..sweep.space import simplicity

#: By how much a configuration may be slower than the winner of another batch size to serve that one, too.
MAY_LOSE = 0.01


class Outcome(NamedTuple):
    """What the records say of one shape in one place."""

    entry: Entry
    variant: str
    """The winner, as its records name it."""
    configs: int
    """How many configurations it was chosen from."""
    fastest: bool
    """Whether it has the lowest median; else it is tied with the one that has, and simpler."""


class Promotion(NamedTuple):
    """A table that was written."""

    path: Path
    table: TunedTable
    outcomes: list[Outcome]
    """Of the records, in their order; the table's other entries were there before."""
    left_out: list[str]
    """What the records decide nothing of, and why."""


def promote(paths: Sequence[Path], out: Path | None = None) -> Promotion:
    """Choose a winner for each shape and place that was swept, and write the table.

    What was timed most often decides, not a first look at many configurations; of tied ones the rule's wins, and then
    the simplest. A table of the same device and kernel that is already there keeps its other entries. A shape of which
    fewer than two configurations could be measured is left out, and so are records of other kernels.

    Args:
        paths: files of records, of one device.
        out: the table; by default that of the device in the package.

    Raises:
        BadRecord: no records of sweeps, or none of the kernel here; several devices; no shape of which two
            configurations could be measured; or a record that lacks something.
        BadTable: ``out`` is there, and is no table or that of another device.
    """
    swept = [(path, record) for path in paths for record in read_records(path) if record.kind == "sweep"]
    names = ", ".join(map(str, paths))
    if not swept:
        raise BadRecord(f"{names}: got no records of kind 'sweep', wants those of `auxhead-tune sweep`")
    device, sm_count = _device(names, [record for _, record in swept])
    records = [(path, record) for path, record in swept if record.protocol["kernel"] == kernel_hash()]
    if not records:
        path, record = swept[-1]
        kernel = record.protocol["kernel"]
        raise BadRecord(f"{path}: kernel: got records of {kernel}, wants {kernel_hash()}, the one here; sweep again")
    candidates = _candidates(records)
    few = [
        f"{shape}, {place}: got {len(measured)} measured configurations, wants two or more"
        for (shape, place), measured in candidates.items()
        if len(measured) < 2
    ]
    if len(few) == len(candidates):
        raise BadRecord(f"{names}: {few[0]}")
    outcomes = _outcomes({thing: measured for thing, measured in candidates.items() if len(measured) >= 2})
    path = out or table_path(device)
    measured = {name: _versions(record.environment.get(name) for _, record in records) for name in VERSIONS}
    table = TunedTable(device=device, sm_count=sm_count, kernel=kernel_hash(), entries=(), **measured)
    decided = {(entry.shape, entry.place): entry for entry, *_ in outcomes}
    kept = [entry for entry in _entries_of(path, table) if (entry.shape, entry.place) not in decided]
    table = replace(table, entries=(*kept, *decided.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(table.as_text(), encoding="utf-8")
    os.replace(unfinished, path)
    others = len(swept) - len(records)
    if others:
        few.append(f"{others:,} records of other kernels than the one here, {kernel_hash()}")
    return Promotion(path, table, outcomes, few)


def _device(names: str, records: Iterable[Record]) -> tuple[str, int]:
    devices = {(record.environment.get("gpu"), record.environment.get("sm_count")) for record in records}
    if len(devices) > 1:
        listed = " and ".join(sorted(f"{gpu} ({sm_count} SMs)" for gpu, sm_count in devices))
        raise BadRecord(f"{names}: device: got records of {listed}, wants those of one device")
    ((gpu, sm_count),) = devices
    if not isinstance(gpu, str) or not isinstance(sm_count, int):
        raise BadRecord(f"{names}: device: got {gpu} ({sm_count} SMs), wants the environment's gpu and sm_count")
    return gpu, sm_count


def _versions(found: Iterable[Any]) -> str | None:
    return ", ".join(sorted({str(one) for one in found if one is not None})) or None


def _entries_of(path: Path, table: TunedTable) -> tuple[Entry, ...]:
    """Return the entries that are there; none if they are those of an earlier kernel."""
    if not path.exists():
        return ()
    old = read_table(path)
    if (old.device, old.sm_count) != (table.device, table.sm_count):
        wanted = f"wants one of {table.device} ({table.sm_count} SMs), or no file"
        raise BadTable(f"{path}: device: got a table of {old.device} ({old.sm_count} SMs), {wanted}")
    return old.entries


_Candidates = dict[tuple[HeadShape, str], dict[LaunchConfig, Measurement]]


def _candidates(records: Iterable[tuple[Path, Record]]) -> _Candidates:
    """Return what decides of each shape and place.

    Of several networks the one decides where something was timed most often, then the one with the most configurations.
    """
    contexts: dict[tuple[HeadShape, str], dict[str, list[Measurement]]] = {}
    for path, record in records:
        try:
            shape, place = shape_from({name: record.cell.get(name) for name in HeadShape._fields}), _place(record)
            measured = None if record.error is not None else measurement(record)
        except ValueError as error:
            raise BadRecord(f"{path}: {record.variant}: {error}") from None
        found = contexts.setdefault((shape, place), {})  # even if nothing of it could be measured
        if measured is not None:
            found.setdefault(_context(record), []).append(measured)
    return {thing: max(map(decisive, found.values()), key=_weight, default={}) for thing, found in contexts.items()}


def _context(record: Record) -> str:
    """Name the network around the head; measurements in different ones say nothing about each other."""
    others = {name: value for name, value in record.cell.items() if name not in HeadShape._fields}
    return json.dumps([others, record.protocol.get("trunk")], sort_keys=True)


def _place(record: Record) -> str:
    place = record.protocol.get("place")
    if place not in PLACES:
        raise ValueError(f"place: got {place!r}, wants one of {', '.join(PLACES)}")
    return str(place)


def _weight(measured: Mapping[LaunchConfig, Measurement]) -> tuple[int, int]:
    """Return how often the measurements that decide were timed, and how many they are."""
    return max(map(times, measured.values())), len(measured)


def _outcomes(candidates: _Candidates) -> list[Outcome]:
    winners = {}
    for (shape, place), measured in candidates.items():
        rule = config_by_rule(shape)
        simpler_first = sorted(measured, key=simplicity)
        simpler_first.sort(key=rule.__ne__)
        winners[shape, place] = winner({one.config: one.paired for one in measured.values()}, simpler_first)
    outcomes = []
    for (shape, place), measured in candidates.items():
        config = winners[shape, place]
        ratios = {one.config: over_baseline(one.paired) for one in measured.values()}
        entry = Entry(shape, place, config, _serves(shape, place, candidates, winners), round(1 - ratios[config], 4))
        fastest = ratios[config] == min(ratios.values())
        outcomes.append(Outcome(entry, measured[config].variant, len(measured), fastest))
    return outcomes


def _serves(
    shape: HeadShape, place: str, candidates: _Candidates, winners: Mapping[tuple[HeadShape, str], LaunchConfig]
) -> tuple[int, int]:
    """Return how far from its own batch size a winner was measured, next size by next, to be nearly as good as others.

    Sizes in between that nobody measured are served as well: it is good at both ends.
    """
    config = winners[shape, place]

    def loses(samples: int) -> float:
        there = candidates[shape._replace(samples=samples), place]
        if config not in there:
            return math.inf
        best = winners[shape._replace(samples=samples), place]
        return compare_runs(there[config].paired, there[best].paired).median_ratio - 1

    sizes = sorted(other.samples for other, where in candidates if where == place and other[1:] == shape[1:])
    own = sizes.index(shape.samples)
    ends = []
    for beyond in (sizes[:own][::-1], sizes[own + 1 :]):
        good = takewhile(lambda samples: loses(samples) <= MAY_LOSE, beyond)
        ends.append([shape.samples, *good][-1])
    return ends[0], ends[1]


def as_rich(promotion: Promotion) -> Table:
    """Return a table of what was decided, a shape and place a row."""
    drawn = Table(title=f"{promotion.table.device}: what the records decide", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("head", "place", "winner", "time / rule's", "", "serves batch"):
        # a winner's name may be longer than the terminal is wide, and none of it may be missing
        drawn.add_column(heading, no_wrap=heading != "winner", overflow="fold")
    for outcome in sorted(promotion.outcomes, key=lambda one: (one.entry.shape[1:], one.entry.shape.samples)):
        shape, place, config, (low, high), margin = outcome.entry
        whose = "the rule's: " if config == config_by_rule(shape) else ""
        verdict = f"{'fastest' if outcome.fastest else 'tied with the fastest'} of {outcome.configs}"
        served = str(low) if low == high else f"{low} to {high}"
        drawn.add_row(str(shape), place, f"{whose}{outcome.variant}", f"{1 - margin:.3f}", verdict, served)
    return drawn
