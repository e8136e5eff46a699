"""Promotion: makes the winners of sweeps' records the tuned table of their device, and prints what is new in it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from ...kernels.launch.choose_config import chosen_by_rule
from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.kernel_hash import is_measured_code, kernel_hash
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.tuned_table import VERSIONS, BadTable, Entry, TunedTable, read_table, table_path
from ...model.basics.files import writing
from ...model.basics.garbage import no_garbage_collection
from ...model.commands.console import activity
from ..records.decisions import Decision, Measurement, by_shape, deciding, sweep_records
from ..records.record import BadRecord, Record, read_records
from ..records.tables import RecordTable, print_tables, wide_console
from ..sweep.winners import launchable

#: By how much a configuration may be slower than the winner of another batch size to serve that one, too.
MAY_LOSE = 0.01


class Winner(NamedTuple):
    """The winner of one shape."""

    entry: Entry
    variant: str
    """Its name in the records."""
    configs: int
    """Number of configurations that it was chosen from."""
    fastest: bool
    """It has the lowest time over the rule's; else it is tied with the one that has, and simpler."""


class Promotion(NamedTuple):
    """A table that was written."""

    path: Path
    table: TunedTable
    winners: list[Winner]
    """In the order of the records; the table's other entries were there before."""
    left_out: list[str]
    """Heads of which the records decide nothing, and why."""


def promote(paths: Sequence[Path], out: Path | None = None) -> Promotion:
    """Choose a winner for each shape that was swept, and write the table.

    A table of the same device and kernel that is already there keeps its other entries. A shape of which fewer than two
    configurations could be measured is left out, and so are records of other kernels.

    Args:
        paths: files of records, of one device.
        out: the table; by default that of the device in the package.

    Raises:
        BadRecord: no records of sweeps, or none of the kernel here; several devices; no shape of which two
            configurations could be measured; or a record that lacks something.
        BadTable: ``out`` is there, and is no table or that of another device.
    """
    swept = [record for path in paths for record in sweep_records(read_records(path))]
    names = ", ".join(map(str, paths))
    if not swept:
        raise BadRecord(f"{names}: got no records of heads swept alone, wants those of `auxhead-tune sweep`")
    device, sm_count = _device(names, swept)
    records = [record for record in swept if is_measured_code(record.protocol["kernel"])]
    if not records:
        kernel = swept[-1].protocol["kernel"]
        raise BadRecord(f"{names}: kernel: got records of {kernel}, wants {kernel_hash()}, the one here; sweep again")
    candidates = {
        HeadShape(*shape): {one.config: one for one in deciding(launchable(one) for one in its if one.error is None)}
        for shape, its in by_shape(records).items()
    }
    enough = {shape: measured for shape, measured in candidates.items() if len(measured) >= 2}
    left_out = [
        f"{shape}: got {len(measured)} measured configurations, wants two or more"
        for shape, measured in candidates.items()
        if shape not in enough
    ]
    if not enough:
        raise BadRecord(f"{names}: {left_out[0]}")
    winners = _winners(enough)
    path = out or table_path(device)
    if path.exists() and not path.is_file():
        raise BadTable(f"{path}: is no file, wants one whose other entries stay")
    versions = {name: _versions(record.environment.get(name) for record in records) for name in VERSIONS}
    decided = {entry.shape: entry for entry, *_ in winners}
    kept = [one for one in _entries_of(path, device, sm_count) if one.shape not in decided]
    entries = (*kept, *decided.values())
    table = TunedTable(device=device, sm_count=sm_count, kernel=kernel_hash(), entries=entries, **versions)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path) as file:
        file.write(table.as_text().encode())
    others = len(swept) - len(records)
    if others:
        left_out.append(f"{others:,} records of other kernels than the one here, {kernel_hash()}")
    return Promotion(path, table, winners, left_out)


def _device(names: str, records: Iterable[Record]) -> tuple[str, int]:
    devices = {(record.environment.get("gpu"), record.environment.get("sm_count")) for record in records}
    if len(devices) > 1:
        listed = " and ".join(sorted(f"{gpu} ({sm_count} SMs)" for gpu, sm_count in devices))
        raise BadRecord(f"{names}: device: got records of {listed}, wants those of one device")
    ((gpu, sm_count),) = devices
    if not isinstance(gpu, str) or not isinstance(sm_count, int):
        raise BadRecord(f"{names}: device: got {gpu} ({sm_count} SMs), wants the environment's gpu and sm_count")
    return gpu, sm_count


def _versions(found: Iterable[object]) -> str | None:
    return ", ".join(sorted({str(one) for one in found if one is not None})) or None


def _entries_of(path: Path, device: str, sm_count: int) -> tuple[Entry, ...]:
    """Return the entries that are there; none if they are those of an earlier kernel."""
    if not path.exists():
        return ()
    old = read_table(path)
    if (old.device, old.sm_count) != (device, sm_count):
        wanted = f"wants one of {device} ({sm_count} SMs), or no file"
        raise BadTable(f"{path}: device: got a table of {old.device} ({old.sm_count} SMs), {wanted}")
    return old.entries


def _winners(candidates: Mapping[HeadShape, Mapping[LaunchConfig, Measurement]]) -> list[Winner]:
    decisions = {}
    for shape, measured in candidates.items():  # beside the rule's as it was then: all times are over its
        rules = [config for config, one in measured.items() if one.variant == one.rule]
        times = {config: one.paired for config, one in measured.items()}
        decisions[shape] = Decision(times, rules[0] if rules else chosen_by_rule(shape))
    found = []
    for shape, decided in decisions.items():
        config, measured = decided.winner, candidates[shape]
        assert config is not None, "there are two or more"
        margin = round(1 - decided.times[config].over_baseline, 4)
        entry = Entry(shape, config, _serves(shape, decisions), margin)
        found.append(Winner(entry, measured[config].variant, len(measured), decided.winner_is_fastest))
    return found


def _serves(shape: HeadShape, decisions: Mapping[HeadShape, Decision[LaunchConfig]]) -> tuple[int, int]:
    """Return how far from its own batch size a winner was measured, next size by next, to be nearly as good as others.

    Sizes in between that nobody measured are served as well: it is good at both ends.
    """
    config = decisions[shape].winner

    def loses(samples: int) -> float:
        there = decisions[shape._replace(samples=samples)]
        over_best = there.compare(config, there.winner)
        return math.inf if over_best is None else over_best.median_ratio - 1

    sizes = sorted(other.samples for other in decisions if other[1:] == shape[1:])
    own = sizes.index(shape.samples)
    ends = []
    for further in (sizes[:own][::-1], sizes[own + 1 :]):
        ends.append([shape.samples, *takewhile(lambda samples: loses(samples) <= MAY_LOSE, further)][-1])
    return ends[0], ends[1]


def promotion_table(promotion: Promotion) -> RecordTable:
    """Return a table of what was decided, a shape a row."""
    rows: list[tuple[str, ...]] = []
    for winner in sorted(promotion.winners, key=lambda one: (one.entry.shape[1:], one.entry.shape.samples)):
        shape, config, (low, high), margin = winner.entry
        whose = "today's rule: " if config == chosen_by_rule(shape) else ""
        verdict = f"{'fastest' if winner.fastest else 'tied with the fastest'} of {winner.configs}"
        served = str(low) if low == high else f"{low} to {high}"
        rows.append((str(shape), f"{whose}{winner.variant}", verdict, served, f"{1 - margin:.3f}"))
    columns = ("head", "winner", "", "serves batch", "time / rule's when measured")
    remarks = [f"Left out: {one}" for one in promotion.left_out]
    return RecordTable(f"{promotion.table.device}: what the records decide", columns, 4, rows, remarks)


def run_promote(records: Sequence[Path], out: Path | None) -> None:
    """Write the table and print what is new in it; raises as :func:`promote`."""
    doing = f"Reading and comparing records of {', '.join(map(str, records))}"
    with activity(doing), no_garbage_collection():
        promotion = promote(records, out)
    printed = wide_console()
    print_tables(printed, [promotion_table(promotion)])
    entries, new = len(promotion.table.entries), len(promotion.winners)
    kept = f", {entries - new} of them from before" if entries > new else ""
    printed.print(f"Table: {promotion.path}, {entries} entries{kept}", soft_wrap=True)
