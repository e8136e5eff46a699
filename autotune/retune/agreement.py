"""How far tunings of one head that know nothing of each other agree: as a record, and in a table."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...kernels.launch_config import LaunchConfig
from ..measuring.targets import NETWORK, Target
from ..records.comparison import Difference
from ..records.record import Record, utc_now
from ..records.tables import RecordTable
from ..sweep.records import Book, shape_of
from ..sweep.space import text

#: The kind of its records.
KIND = "retune"
#: Of every table.
COLUMNS = ("head", "place", "chosen most often", "tunings", "the same", "tied with it", "others", "time / that of it")
#: How many of them are text.
_TEXT_COLUMNS = 3


class Agreement(NamedTuple):
    """What tunings of one head in one place came to."""

    target: Target
    place: str
    tunings: int
    """Those that came to nothing included."""
    chosen: Counter[LaunchConfig]
    """How often what was chosen."""
    over_usual: Mapping[LaunchConfig, Difference]
    """What was chosen against what was chosen most often, measured together in a run of their own."""

    def record(self, book: Book) -> Record:
        """Return it as it is kept, with the environment and protocol of a book of its measurements."""
        cell: dict[str, Any] = self.target.shape._asdict()
        protocol = {**book.protocol, "place": self.place, "rule": text(self.target.rule), "tunings": self.tunings}
        if self.place == NETWORK:
            cell |= {"model": self.target.model, "tap": ", ".join(self.target.taps)}
            protocol |= book.network
        chosen = self.chosen.most_common()
        return Record(
            kind=KIND,
            cell=cell,
            exits="never",
            variant=text(chosen[0][0]) if chosen else "-",
            run="",
            utc=utc_now(),
            environment=book.environment,
            protocol=protocol,
            paired=[
                {"role": "chosen", "variant": text(config), "tunings": count}
                | (self.over_usual[config]._asdict() if config in self.over_usual else {})
                for config, count in chosen
            ],
        )


def agreement_tables(records: Iterable[Record]) -> list[RecordTable]:
    """Return a table for each environment and kernel, a head in a place a row, with the count of all below.

    Of several records of one head the last counts.
    """
    groups: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in records:
        if record.kind == KIND:
            group = groups.setdefault((*record.environment_key, record.protocol.get("kernel")), {})
            group[json.dumps([record.cell, record.protocol["place"]])] = record
    return [_table(list(group.values())) for group in groups.values()]


class _Counts(NamedTuple):
    tunings: int
    same: int
    tied: int

    @property
    def others(self) -> int:
        return self.tunings - self.same - self.tied


def _table(records: Sequence[Record]) -> RecordTable:
    environment, kernel = records[0].environment, records[0].protocol.get("kernel")
    title = f"Tuned afresh; {environment.get('gpu')}, torch {environment.get('torch')}, kernel {kernel}"
    counts = [_counts(record) for record in records]
    total = _Counts(*(sum(column) for column in zip(*counts, strict=True)))
    said = (
        f"Of {total.tunings} tunings of {len(records)} heads {total.same} chose the same as most of that head, "
        f"{total.tied} what is tied with it, {total.others} neither: "
        f"{(total.same + total.tied) / total.tunings:.1%} agree."
    )
    rows = [_row(record, count) for record, count in zip(records, counts, strict=True)]
    return RecordTable(title, COLUMNS, _TEXT_COLUMNS, rows, [said])


def _counts(record: Record) -> _Counts:
    tied = sum(pair["tunings"] for pair in record.paired[1:] if (found := _difference(pair)) and found.is_tie)
    return _Counts(record.protocol["tunings"], record.paired[0]["tunings"] if record.paired else 0, tied)


def _row(record: Record, counts: _Counts) -> tuple[str, ...]:
    head = f"{record.cell['tap']} of {record.cell['model']}: " if "tap" in record.cell else ""
    ratios = [
        f"{one.median_ratio:.3f} ({one.low:.3f}-{one.high:.3f})" for one in map(_difference, record.paired[1:]) if one
    ]
    numbers = (counts.tunings, counts.same, counts.tied, counts.others)
    return (
        f"{head}{shape_of(record)}",
        record.protocol["place"],
        record.variant,
        *map(str, numbers),
        ", ".join(ratios) or "-",
    )


def _difference(pair: Mapping[str, Any]) -> Difference | None:
    """Return how what was chosen compares with what was chosen most often, if it could be measured."""
    return Difference(*(pair[name] for name in Difference._fields)) if "median_ratio" in pair else None
