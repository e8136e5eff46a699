"""Records of sweeps: appended when a measurement is finished, found again, or in place of a GPU what a sweep asks."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels.launch.launch_config import LaunchConfig
from ..measuring.failures import Failure
from ..measuring.heads_alone import Target
from ..records.comparison import Paired, typical
from ..records.decisions import sweep_records
from ..records.record import Record, append_record, read_records
from ..records.summaries import rounded, with_samples
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
    _found: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.out is not None and self.out.exists():
            for record in sweep_records(read_records(self.out)):
                self._found.setdefault(_identity(record), []).append(record)

    def find(self, blank: Record) -> Paired | Failure | None:
        """Return what was recorded of a thing, in as many captures and rounds or the next larger numbers."""
        found = self._found.get(_identity(blank), [])
        enough = [
            one
            for one in found
            if one.error is not None or all(a >= b for a, b in zip(_size(one), _size(blank), strict=True))
        ]
        best = min(enough, key=lambda one: (one.error is not None, _size(one)), default=None)
        return None if best is None else result_of(best)

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
        protocol: dict[str, Any] = {**self.protocol, "config": dataclasses.asdict(config)}
        protocol |= {"captures": ask.captures, "rounds": ask.rounds, "rule": text(target.rule)}
        return Record("sweep", target.shape._asdict(), text(config), "", self.environment, protocol)


def result_of(record: Record) -> Paired | Failure:
    """Return what a sweep's record says."""
    if record.error is not None:
        kind, _, detail = record.error.partition(": ")
        return Failure(kind, detail)
    assert record.device_us is not None
    return Paired(record.device_us["samples"], record.paired[0]["samples"], record.run)


def _size(record: Record) -> tuple[int, int]:
    """Return in how many captures, and rounds of each, it was measured."""
    return record.protocol["captures"], record.protocol["rounds"]


def _identity(record: Record) -> str:
    """Return what is equal for two measurements of one thing, all but how often it was timed."""
    protocol = {name: value for name, value in record.protocol.items() if name not in _NOT_IDENTIFYING}
    environment = (*record.environment_key, record.environment.get("sm_count"))
    return json.dumps([record.key, environment, protocol], sort_keys=True)
