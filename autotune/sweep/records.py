"""The measurements of sweeps on disk: each appended when it is finished, and found again under an equal key."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...kernels.head_shape import HeadShape
from ...kernels.launch_config import LaunchConfig
from ..measuring.failures import Failure
from ..measuring.targets import NETWORK, Target
from ..measuring.timers import FINAL_ROUNDS
from ..records.comparison import Paired, Timings, over_baseline, typical
from ..records.record import BadRecord, Record, append_record, read_records, utc_now
from ..records.summaries import with_samples
from .decisive import decisive, measurement
from .search import Answers, Ask
from .space import text

#: The kind of these records; files of earlier versions also hold some of kind "network", which nothing reads.
KIND = "sweep"
#: What of a record's protocol may differ between two measurements of one thing.
_NO_KEY = ("captures", "rounds", "config")


@dataclass
class Book:
    """The records of one device and kernel: what is there under an equal key is not measured again."""

    out: Path | None
    """Where records are appended; None: nowhere."""
    environment: dict[str, Any]
    """See :class:`~auxhead.autotune.records.record.Record`, and sm_count."""
    protocol: dict[str, Any]
    """kernel (its hash) and what else says how the numbers come about."""
    network: dict[str, Any]
    """trunk (its fingerprint) and what else of a network only times in situ depend on."""
    _found: dict[str, list[Record]] = field(default_factory=dict)
    _of_head: dict[str, list[Record]] = field(default_factory=dict)
    """What was timed of a head in a place."""

    def __post_init__(self) -> None:
        if self.out is not None and self.out.exists():
            for record in read_records(self.out):
                self._remember(record)

    def find(self, blank: Record) -> Paired | Failure | None:
        """Return what was recorded of a thing, in as many captures and rounds or the next larger numbers.

        Args:
            blank: from ``of_head``.
        """
        records, (captures, rounds) = self._found.get(_key(blank), []), size(blank)
        enough = [one for one in records if one.error is not None or has_enough(one, rounds, captures)]
        return result_of(min(enough, key=lambda one: (one.error is not None, size(one)))) if enough else None

    def add(self, blank: Record, result: Paired | Failure) -> Paired | Failure:
        """Append a finished measurement, and return it as it will be read.

        Args:
            blank: from ``of_head``.
            result: beside the baseline that the blank's protocol names.
        """
        if isinstance(result, Failure):
            record = dataclasses.replace(blank, error=str(result))
        else:
            own, baseline = _rounded(result.own), _rounded(result.baseline)
            ratio = over_baseline(Paired(own, baseline, result.run))
            pair = {"role": "rule", "variant": blank.protocol["rule"]}
            pair |= {"device_us": typical(baseline), "device_ratio": ratio, "samples": baseline}
            record = dataclasses.replace(blank, run=result.run, device_us=with_samples(own), paired=[pair])
        if self.out is not None:
            append_record(self.out, record)
        self._remember(record)
        return result_of(record)

    def _remember(self, record: Record) -> None:
        if record.kind != KIND:
            return
        self._found.setdefault(_key(record), []).append(record)
        if record.error is None:
            self._of_head.setdefault(_key(dataclasses.replace(record, variant="")), []).append(record)

    def decided(self, target: Target, place: str) -> Answers:
        """Return what of a head tables choose from: what was timed most often, by whomever.

        An earlier search may have found others than this one does.

        Raises:
            BadRecord: one of them has no configuration.
        """
        blank = self.of_head(target, Ask(place, (), FINAL_ROUNDS, share=1.0), target.rule)
        timed = self._of_head.get(_key(dataclasses.replace(blank, variant="")), [])
        try:
            return {config: one.paired for config, one in decisive(map(measurement, timed)).items()}
        except ValueError as error:
            raise BadRecord(f"{self.out}: {target.shape}, {place}: {error}") from None

    def of_head(self, target: Target, ask: Ask, config: LaunchConfig) -> Record:
        """Return the record of one of the configurations that were asked for, without any result."""
        cell: dict[str, Any] = target.shape._asdict()
        protocol: dict[str, Any] = {"place": ask.place, "config": dataclasses.asdict(config)}
        if ask.place == NETWORK:
            cell |= {"model": target.model, "tap": ", ".join(target.taps)}
            protocol |= self.network
        how = {"captures": ask.captures, "rounds": ask.rounds, "rule": text(target.rule)}
        return Record(
            kind=KIND,
            cell=cell,
            exits="never",
            variant=text(config),
            run="",
            utc=utc_now(),
            environment=self.environment,
            protocol={**self.protocol, **protocol, **how},
        )


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


def has_enough(record: Record, rounds: int, captures: int) -> bool:
    """Whether it was measured in at least so many rounds of at least so many captures."""
    return bool(record.protocol["rounds"] >= rounds and record.protocol["captures"] >= captures)


def size(record: Record) -> tuple[int, int]:
    """Return in how many captures, and rounds of each, it was measured."""
    return record.protocol["captures"], record.protocol["rounds"]


def sweep_records(records: Iterable[Record]) -> list[Record]:
    """Return those of sweeps."""
    return [record for record in records if record.kind == KIND]


def _key(record: Record) -> str:
    """Return what is equal for two measurements of one thing, all but how often."""
    protocol = {name: value for name, value in record.protocol.items() if name not in _NO_KEY}
    environment = (*record.environment_key, record.environment.get("sm_count"))
    return json.dumps([record.key, environment, protocol], sort_keys=True)


def _rounded(timings: Timings) -> list[list[float]]:
    return [[round(us, 3) for us in rounds] for rounds in timings]
