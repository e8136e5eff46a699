"""Measures heads alone, those that the file of records lacks, and keeps the variants of one round together."""

import dataclasses
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...kernels.launch.kernel_hash import kernel_hash
from ...kernels.launch.launch_config import LaunchConfig
from ...model.basics.bad_input import BadInput
from ..measuring.environment import clocks, release_memory
from ..measuring.failures import DeviceLost, Failure
from ..measuring.head_timing import COPIED, HeadTiming, floor_of, time_copies
from ..measuring.heads_alone import FUSED, PEERS
from ..measuring.networks import find_networks
from ..measuring.options import NetworkChoice
from ..measuring.progress import Status, SweepProgress
from ..measuring.timers import CAPTURES, FINAL_ROUNDS
from ..records.comparison import Paired, compare, typical
from ..records.record import Record, append_record, is_settled, read_records
from ..records.summaries import Timings, rounded, with_samples
from ..records.tables import print_tables, wide_console
from .tables import head_tables

#: The kind of these records.
KIND = "heads"
#: The variant that is no head: the least that its bytes take.
BYTES = "bytes"
#: Digits of microseconds, and of those of a head's bytes, which are a hundred at least.
_DIGITS, _BYTES_DIGITS = 4, 7


class Head(NamedTuple):
    """A head to be measured."""

    cell: dict[str, Any]
    """The cell of its records."""
    config: LaunchConfig
    """The configuration that the project chooses."""
    bytes_moved: int
    """Bytes that a head of that shape has to read and write."""
    variants: tuple[str, ...] = PEERS
    """Of ``heads_alone.LAUNCHES``, those that are timed."""


@dataclass
class HeadRecords:
    """A file of records of one device and kernel: heads that are there are not measured again."""

    out: Path
    """File that records are appended to."""
    environment: dict[str, Any]
    """See :class:`~auxhead.autotune.records.record.Record`."""
    protocol: dict[str, Any]
    """kernel (its hash), rounds and what else says how the numbers come about."""
    kind: str = KIND
    """The kind of the records."""
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
            {record.variant for record in run} >= {*head.variants, BYTES}
            and all(
                record.cell == head.cell
                and is_settled(record, self.environment, wanted["rounds"])
                and record.environment.get("sm_count") == self.environment.get("sm_count")
                and all(record.protocol.get(name) == wanted[name] for name in ("kernel", "config"))
                for record in run
            )
            for run in self._runs.values()
        )

    def add(
        self, head: Head, results: Mapping[str, Paired | Failure], copies: Timings, clocks: dict[str, float] | None,
        **how: int,
    ) -> None:  # fmt: skip
        """Append a line for each variant, and one for the bytes at the speed of copies; see ``time_copies``.

        Clocks are as found after the measurement, ``how`` is what of the protocol is of this head alone.
        """
        around, run = {**self.environment, "clocks": clocks}, secrets.token_hex(6)
        protocol = {**self._protocol(head), **how}

        def append(variant: str, protocol: Mapping[str, Any] = protocol, **rest: Any) -> None:
            record = Record(self.kind, head.cell, variant, run, around, dict(protocol), **rest)
            append_record(self.out, record)
            self._remember(record)

        for variant, result in results.items():
            if isinstance(result, Failure):
                append(variant, error=str(result))
            else:
                own, baseline = rounded(result.own, _DIGITS), rounded(result.baseline, _DIGITS)
                append(variant, device_us=with_samples(own), paired=[] if variant == FUSED else [_pair(own, baseline)])
        rate = {"bytes": head.bytes_moved, "bytes_per_second": round(2 * COPIED / typical(copies) * 1e6)}
        least = with_samples(rounded(floor_of(head.bytes_moved, copies), _BYTES_DIGITS))
        append(BYTES, {**protocol, **rate, "captures": 1}, device_us=least)

    def _protocol(self, head: Head) -> dict[str, Any]:
        return {**self.protocol, "config": dataclasses.asdict(head.config)}

    def _remember(self, record: Record) -> None:
        if record.kind == self.kind:
            self._runs.setdefault(record.run, []).append(record)


def _pair(own: Timings, fused: Timings) -> dict[str, Any]:
    ratio, low, high = compare(own, fused)
    pair = {"role": FUSED, "variant": FUSED, "device_us": typical(fused), "device_ratio": ratio}
    return {**pair, "low": low, "high": high}


def run_heads(chosen: NetworkChoice, out: Path | None) -> None:
    """Measure the heads of the networks chosen, and print the table of them.

    Raises:
        BadInput: no CUDA device, no such network, or a device that was lost.
        BadRecord: ``out`` cannot be read.
    """
    console, networks = wide_console(), find_networks(KIND, chosen.own, chosen.cells, out)
    asked: list[dict[str, Any]] = []
    failures: Counter[str] = Counter()
    copies: Timings | None = None
    with SweepProgress(console) as progress:
        for number, cell in enumerate(networks.cells):

            def tell(doing: str, of_cell: float, number: int = number) -> None:
                progress.show(Status((number + of_cell) / len(networks.cells), doing, "", failures))

            tell(f"{cell}: building", 0.0)
            timing = HeadTiming.of_network(networks.subject(cell), "as_is")
            how = {"kernel": kernel_hash(), **timing.protocol, "rounds": FINAL_ROUNDS, "captures": CAPTURES}
            kept = HeadRecords(networks.where, networks.environment, how)
            kind = {name: value for name, value in cell.as_json().items() if name == "heads"}
            for index, (target, alone) in enumerate(timing.heads.items()):
                at = {"model": target.model, "tap": ", ".join(target.taps)}
                head = Head({**target.shape._asdict(), **at, **kind}, alone.chosen, alone.bytes_moved)
                asked.append(head.cell)
                if kept.has(head):
                    continue
                copies = copies or time_copies(networks.device, FINAL_ROUNDS)

                def begins(variant: str, at: int = index, what: object = target, of: int = len(timing.heads)) -> None:
                    tell(f"{what}: {variant}", (at + PEERS.index(variant) / len(PEERS)) / of)

                try:
                    results = timing.against_peers(target, FINAL_ROUNDS, CAPTURES, begins)
                except DeviceLost as error:
                    kept.add(head, dict.fromkeys(PEERS, Failure("DeviceLost", str(error))), copies, None)
                    raise BadInput(f"{error}; it is recorded: the same command goes on with the rest") from None
                failures.update(result.kind for result in results.values() if isinstance(result, Failure))
                kept.add(head, results, copies, clocks(networks.device))
            del timing, alone
            release_memory()
    found = [record for record in read_records(networks.where) if record.cell in asked]
    print_tables(console, head_tables(found), networks.where)
