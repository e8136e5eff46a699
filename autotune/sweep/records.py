"""Records of sweeps: appended when a measurement is finished, found again, or in place of a GPU what a sweep asks."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels.launch.head_shape import HeadShape
from ...kernels.launch.launch_config import LaunchConfig
from ...kernels.launch.launch_rule import config_by_rule
from ..measuring.failures import Failure
from ..measuring.targets import NETWORK, Target
from ..records.comparison import Paired, typical
from ..records.decisions import of_last_kernel, sweep_records
from ..records.record import Record, append_record, read_records
from ..records.summaries import network_record, rounded, with_samples
from .config_text import text
from .search import Ask

#: Fields of the protocol that may differ between two measurements of one thing.
_NOT_IDENTIFYING = ("captures", "rounds", "config")
#: Digits of microseconds.
_DIGITS = 3


@dataclass
class SweepRecords:
    """A file of records of one device and kernel, and those of the same things that it held before."""

    out: Path | None
    """File that records are appended to; None: they are not kept."""
    environment: dict[str, Any]
    """See :class:`~auxhead.autotune.records.record.Record`, and sm_count."""
    protocol: dict[str, Any]
    """kernel (its hash) and what else says how the numbers come about."""
    network: dict[str, Any]
    """trunk (its fingerprint) and what else of a network only times in situ depend on."""
    _found: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.out is not None and self.out.exists():
            for record in sweep_records(read_records(self.out)):
                self._found.setdefault(_identity(record), []).append(record)

    def find(self, blank: Record) -> Paired | Failure | None:
        """Return what was recorded of a thing, in as many captures and rounds or the next larger numbers."""
        captures, rounds = size(blank)
        found = smallest_enough(self._found.get(_identity(blank), []), rounds, captures)
        return None if found is None else result_of(found)

    def add(self, blank: Record, result: Paired | Failure) -> Paired | Failure:
        """Append a measurement, timed beside the baseline that ``blank`` names, and return it as it will be read."""
        if isinstance(result, Failure):
            record = dataclasses.replace(blank, error=str(result))
        else:
            own, baseline = rounded(result.own, _DIGITS), rounded(result.baseline, _DIGITS)
            ratio = Paired(own, baseline, result.run).over_baseline
            pair = {"role": "rule", "variant": blank.protocol["rule"]}
            pair |= {"device_us": typical(baseline), "device_ratio": ratio, "samples": baseline}
            record = dataclasses.replace(blank, run=result.run, device_us=with_samples(own), paired=[pair])
        if self.out is not None:
            append_record(self.out, record)
        self._found.setdefault(_identity(record), []).append(record)
        return result_of(record)

    def blank(self, target: Target, ask: Ask, config: LaunchConfig) -> Record:
        """Return the record of one of the configurations that were asked for, without any result."""
        cell: dict[str, Any] = target.shape._asdict()
        protocol: dict[str, Any] = {**self.protocol, "place": ask.place, "config": dataclasses.asdict(config)}
        if ask.place == NETWORK:
            cell |= {"model": target.model, "tap": ", ".join(target.taps)}
            protocol |= self.network
        protocol |= {"captures": ask.captures, "rounds": ask.rounds, "rule": text(target.rule)}
        return network_record("sweep", cell, text(config), self.environment, run="", protocol=protocol)


def result_of(record: Record) -> Paired | Failure:
    """Return what a sweep's record says."""
    if record.error is not None:
        kind, _, detail = record.error.partition(": ")
        return Failure(kind, detail)
    assert record.device_us is not None
    return Paired(record.device_us["samples"], record.paired[0]["samples"], record.run)


def shape_of(record: Record) -> HeadShape:
    """Return the shape of the head that a sweep's record is about."""
    return HeadShape(**{name: record.cell[name] for name in HeadShape._fields})


def smallest_enough(records: Iterable[Record], rounds: int, captures: int) -> Record | None:
    """Return the first record of the smallest numbers that are no less than these; else a failure, if there is any."""

    def enough(one: Record) -> bool:
        return one.error is not None or (one.protocol["rounds"] >= rounds and one.protocol["captures"] >= captures)

    return min(filter(enough, records), key=lambda one: (one.error is not None, size(one)), default=None)


def size(record: Record) -> tuple[int, int]:
    """Return in how many captures, and rounds of each, it was measured."""
    return record.protocol["captures"], record.protocol["rounds"]


def _identity(record: Record) -> str:
    """Return what is equal for two measurements of one thing, all but how often it was timed."""
    protocol = {name: value for name, value in record.protocol.items() if name not in _NOT_IDENTIFYING}
    environment = (*record.environment_key, record.environment.get("sm_count"))
    return json.dumps([record.key, environment, protocol], sort_keys=True)


#: The kind of failure of what no record holds.
UNAVAILABLE = "not recorded"


class RecordedTimes:
    """A :class:`~auxhead.autotune.sweep.measure.Measurer` that answers from records, wherever they were measured.

    Not from those beside another rule's configuration than today's, or of another kernel than the last.
    The answer has as many captures and rounds as asked for, or the next larger numbers, or else the largest; of several
    such records it is the last.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        """Answer from ``records``, those of other kinds aside."""
        self._found: dict[tuple[HeadShape, str, str, str], list[Record]] = {}
        """By the head's shape, the place, there the model and taps (alone none), and the configuration's name."""
        for record in of_last_kernel(records):
            shape, place = shape_of(record), record.protocol["place"]
            if record.paired and record.paired[0]["variant"] != text(config_by_rule(shape)):
                continue
            network = f"{record.cell['model']}: {record.cell['tap']}" if place == NETWORK else ""
            self._found.setdefault((shape, place, network, record.variant), []).append(record)

    def prepare(self, target: Target, place: str, configs: Sequence[LaunchConfig]) -> Mapping[LaunchConfig, Failure]:
        """Return what failed when it was recorded, at whatever step, and what is not there."""
        found = {config: self._result(target, place, config, 1, 1) for config in configs}
        return {config: result for config, result in found.items() if isinstance(result, Failure)}

    def time(
        self, target: Target, place: str, configs: Sequence[LaunchConfig], rounds: int, captures: int
    ) -> Mapping[LaunchConfig, Paired | Failure]:
        """Return the times that were recorded."""
        return {config: self._result(target, place, config, rounds, captures) for config in configs}

    def _result(self, target: Target, place: str, config: LaunchConfig, rounds: int, captures: int) -> Paired | Failure:
        network = f"{target.model}: {', '.join(target.taps)}" if place == NETWORK else ""
        records = self._found.get((target.shape, place, network, text(config)))
        if records is None:
            return Failure(UNAVAILABLE, f"{text(config)}, {place}")
        measured = [record for record in records[::-1] if record.error is None] or records[::-1]  # the last one first
        return result_of(smallest_enough(measured, rounds, captures) or max(measured, key=size))


def recorded_targets(records: Sequence[Record], model: str) -> list[Target]:
    """Return the targets of a model that were swept in situ, in order of first appearance."""
    found = [
        Target(shape_of(record), model, tuple(record.cell["tap"].split(", ")))
        for record in of_last_kernel(records)
        if record.protocol["place"] == NETWORK and record.cell["model"] == model
    ]
    return list(dict.fromkeys(found))
