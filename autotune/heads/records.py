"""Records of heads: all variants of a head together, which were timed in the same rounds."""

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...kernels.launch_config import LaunchConfig
from ..measuring.failures import Failure
from ..measuring.head_timing import COPIED, CopySpeed
from ..measuring.heads_alone import FUSED, LAUNCHES
from ..measuring.targets import Target
from ..measuring.timers import FINAL_ROUNDS
from ..records.comparison import Paired, compare, typical
from ..records.record import Record, append_record, is_settled, read_records
from ..records.summaries import Timings, network_record, rounded, with_samples

#: The kind of these records.
KIND = "heads"
#: The variant that is no head: the least that its bytes take.
BYTES = "bytes"
#: Digits of microseconds: the bytes of a small head take hundredths of one.
_DIGITS = 4


class Head(NamedTuple):
    """A head to be measured."""

    target: Target
    config: LaunchConfig
    """The configuration that the project chooses."""
    bytes_moved: int
    """Bytes that a head of that shape has to read and write."""
    kind: Mapping[str, str] = {}
    """Its kind, by the name "heads", unless it is linear; see ``cells.Heads``."""

    @property
    def cell(self) -> dict[str, Any]:
        """The cell of its records."""
        target = self.target
        return {**target.shape._asdict(), "model": target.model, "tap": ", ".join(target.taps), **self.kind}


@dataclass
class HeadRecords:
    """A file of records of one device and kernel: heads that are there are not measured again."""

    out: Path
    """File that records are appended to."""
    environment: dict[str, Any]
    """See :class:`~auxhead.autotune.records.record.Record`."""
    protocol: dict[str, Any]
    """kernel (its hash) and what else says how the numbers come about."""
    _runs: dict[str, list[Record]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for record in read_records(self.out) if self.out.exists() else []:
            self._remember(record)

    def has(self, head: Head) -> bool:
        """Return True if all variants of a head were measured in one run, or failed as they would again.

        They were so with the same kernel in the same configuration: ratios are to what the fused head was then.
        """
        wanted = self._protocol(head)
        return any(
            {record.variant for record in run} == {*LAUNCHES, BYTES}
            and all(
                record.cell == head.cell
                and is_settled(record, self.environment, FINAL_ROUNDS)
                and record.environment.get("sm_count") == self.environment.get("sm_count")
                and all(record.protocol[name] == wanted[name] for name in ("kernel", "config"))
                for record in run
            )
            for run in self._runs.values()
        )

    def add(
        self, head: Head, results: Mapping[str, Paired | Failure], speed: CopySpeed, clocks: dict[str, float] | None
    ) -> None:
        """Append a line for each of ``peers.LAUNCHES``, and one for the bytes at a speed; clocks are as found after."""
        around, run, protocol = {**self.environment, "clocks": clocks}, secrets.token_hex(6), self._protocol(head)

        def append(variant: str, protocol: Mapping[str, Any] = protocol, **rest: Any) -> None:
            record = network_record(KIND, head.cell, variant, around, run=run, protocol=dict(protocol), **rest)
            append_record(self.out, record)
            self._remember(record)

        for variant, result in results.items():
            if isinstance(result, Failure):
                append(variant, error=str(result))
            else:
                own, baseline = rounded(result.own, _DIGITS), rounded(result.baseline, _DIGITS)
                append(variant, device_us=with_samples(own), paired=[] if variant == FUSED else [_pair(own, baseline)])
        rate = {"bytes": head.bytes_moved, "bytes_per_second": round(2 * COPIED / typical(speed.us) * 1e6)}
        least = with_samples(rounded(speed.floor(head.bytes_moved), _DIGITS))
        append(BYTES, {**protocol, **rate, "captures": 1}, device_us=least)

    def _protocol(self, head: Head) -> dict[str, Any]:
        return {**self.protocol, "config": dataclasses.asdict(head.config)}

    def _remember(self, record: Record) -> None:
        if record.kind == KIND:
            self._runs.setdefault(record.run, []).append(record)


def _pair(own: Timings, fused: Timings) -> dict[str, Any]:
    ratio, low, high = compare(own, fused)
    pair = {"role": FUSED, "variant": FUSED, "device_us": typical(fused), "device_ratio": ratio}
    return {**pair, "low": low, "high": high}
