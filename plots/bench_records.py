"""The benchmark's records as figures want them: the last of each variant, of the network that was measured most."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..autotune.records.record import Record, latest
from .records import NoRecords

#: Where no sample leaves early.
NEVER = "never"


class Network(NamedTuple):
    """What all measurements of one line of a figure have in common."""

    model: str
    dtype: str
    placement: str
    """Of the heads."""
    heads: int
    input: str
    """Sizes of one sample, "3x224x224"."""

    def __str__(self) -> str:
        return f"{self.model}, {self.dtype}, {self.input}, {self.heads} heads (after {self.placement})"


def network_of(record: Record) -> Network:
    """Return the network of a benchmark's record."""
    cell = record.cell
    sizes = "x".join(str(size) for size in cell["input"])
    return Network(cell["model"], cell["dtype"], cell["placement"], len(cell["taps"]), sizes)


def most_measured(records: Iterable[Record], variants: Sequence[str], what: str) -> tuple[Network, list[Record]]:
    """Return the network with the most measurements of some variants, and the last of each of them.

    Args:
        records: of the benchmark.
        variants: their names.
        what: those records are, for the error.

    Raises:
        NoRecords: there is none.
    """
    found = [one for one in latest(records) if one.error is None and one.variant in variants]
    if not found:
        raise NoRecords(f"no record of {what} (variants {', '.join(variants)})")
    ((network, _),) = Counter(map(network_of, found)).most_common(1)
    return network, [one for one in found if network_of(one) == network]


def spread(us: dict[str, Any]) -> dict[str, float]:
    """Return the percentiles that a record has, microseconds."""
    return {name: us[name] for name in ("median", "p20", "p80", "p99") if name in us}


def rounds(records: Iterable[Record]) -> str:
    """Say how often something was timed: "30 to 50 rounds in 1 to 5 fresh captures"."""
    found = list(records)
    return f"{_range(found, 'rounds')} rounds in {_range(found, 'captures')} fresh captures"


def _range(records: Sequence[Record], name: str) -> str:
    values = sorted({int(one.protocol[name]) for one in records})
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
