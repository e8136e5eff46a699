"""Reads what a figure is drawn from: records, all of one device and one set of versions; small print about them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..autotune.records import record as record_format
from ..autotune.records.record import ENVIRONMENT_KEY, BadRecord, Record, latest, read_records

#: The records that come with the package.
COMMITTED = Path(record_format.__file__).parent
#: Where commands leave records, below the folder in which they run.
_LEFT_IN = ("autotune-records/*", "auxhead-*/*.jsonl", "*/report.json", "*/anytime-report.json")
#: The exit pattern in which no sample leaves early.
NEVER = "never"
#: Kinds of which a figure shows one record alone, so that the others may be of other devices.
SHOWN_ALONE = ("doctor",)


class NoRecords(BadRecord):
    """No records that the figure could be drawn from."""


#: What was read for other figures of one command, so that nothing is twice: by file.
Known = dict[Any, Any]


def read_kinds(paths: Sequence[Path], kinds: Sequence[str], known: Known | None = None) -> list[Record]:
    """Return the records of some kinds from files of JSON lines, in their order, failures included.

    Raises:
        NoRecords: no such file, or no measurement of one of the kinds in any of them.
        BadRecord: a line that is no record of this schema; records of several devices or versions, unless each is
            shown alone.
    """
    files, found, known = _list(paths), list[Record](), {} if known is None else known
    for path in paths:
        if not path.exists():
            raise NoRecords(f"{path}: no such file, wants records of kind {_list(kinds)}")
        if path not in known:
            known[path] = read_records(path)
        found += [one for one in known[path] if one.kind in kinds]
    for kind in kinds:
        if not any(one.kind == kind and one.error is None for one in found):
            raise NoRecords(f"{files}: no measurement of kind {kind!r}")
    environments = {one.environment_key for one in found if one.kind not in SHOWN_ALONE}
    for index, name in enumerate(ENVIRONMENT_KEY):  # a reader would compare several in one figure
        values = {str(one[index]) for one in environments}
        if len(values) > 1:
            raise BadRecord(f"{files}: got records of several {name} ({_list(sorted(values))}), wants those of one")
    return found


def own_files(folder: Path) -> list[Path]:
    """Return the files of records that commands have left below a folder, the one written last first."""
    found = {path for pattern in _LEFT_IN for path in folder.glob(pattern) if path.is_file()}
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def stamp(records: Sequence[Record], *more: str) -> str:
    """Return the small print of a figure: ``more`` lines, then hardware, versions and dates of its records."""
    environment = records[0].environment
    commits = sorted({str(one.environment.get("commit") or "?")[:9] for one in records})
    dates = sorted({one.utc[:10] for one in records})
    line = (
        f"{environment.get('gpu')}, driver {environment.get('driver')}, CUDA {environment.get('cuda')}, "
        f"cuDNN {environment.get('cudnn')}, torch {environment.get('torch')}, Triton {environment.get('triton')}; "
        f"auxhead {environment.get('auxhead')} ({_list(commits) if len(commits) < 4 else f'{len(commits)} commits'}), "
        f"{dates[0] if len(dates) == 1 else f'{dates[0]} to {dates[-1]}'}"
    )
    return "\n".join((*more, line))


class Network(NamedTuple):
    """A network as the benchmark records it, whatever the batch size and number of classes."""

    model: str
    dtype: str
    placement: str  # of the heads
    heads: int
    input: str  # sizes of one sample, "3x224x224"
    kind: str  # of heads, such as "hidden "; of linear ones ""

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, {self.input}, {self.heads} {self.kind}heads (after {self.placement})"


def network_of(record: Record) -> Network:
    """Return the network of a benchmark's record."""
    cell = record.cell
    sizes = "x".join(map(str, cell["input"]))
    kind = f"{cell['heads']} " if "heads" in cell else ""
    return Network(cell["model"], cell["dtype"], cell["placement"], len(cell["taps"]), sizes, kind)


def most_measured(records: Iterable[Record], variants: Sequence[str], what: str) -> tuple[Network, list[Record]]:
    """Return the network with the most measurements of some variants, and the last measurement of each.

    Raises:
        NoRecords: nothing was measured; the message calls the records ``what``.
    """
    found = [one for one in latest(records) if one.error is None and one.variant in variants]
    if not found:
        raise NoRecords(f"no record of {what} (variants {', '.join(variants)})")
    ((network, _),) = Counter(map(network_of, found)).most_common(1)
    return network, [one for one in found if network_of(one) == network]


def known_percentiles(us: dict[str, Any]) -> dict[str, float]:
    """Return the percentiles in a record's summary of times, microseconds."""
    return {name: us[name] for name in ("median", "p20", "p80", "p99") if name in us}


def rounds(records: Sequence[Record]) -> str:
    """Say how often something was timed: "30 to 50 rounds in 1 to 5 fresh captures"."""
    return f"{_range(records, 'rounds')} rounds in {_range(records, 'captures')} fresh captures"


def _range(records: Sequence[Record], name: str) -> str:
    values = sorted({int(one.protocol[name]) for one in records})
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
