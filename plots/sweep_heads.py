"""The heads that a sweep tuned, as figures want them: what decides of each configuration, alone and in the network."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..autotune.records.comparison import DECIDING, Difference, Paired, compare_runs, over_baseline
from ..autotune.records.decisions import deciding, of_last_kernel, timed, times
from ..autotune.records.record import BadRecord, Record

#: Fields of a cell that say where the head is, not what it is.
_WHERE = ("model", "tap")
#: Of a ratio: numpy's logarithms differ in their last digit from processor to processor, what is drawn must not.
_DIGITS = 9


class Configured(NamedTuple):
    """A configuration of a head in one place."""

    variant: str
    rule: str
    """The configuration that it was timed beside."""
    paired: Paired
    forks: tuple[str, ...] | None
    """In situ: the taps after which launches left the trunk."""
    config: dict[str, Any]
    """Fields of the LaunchConfig."""
    median_us: float
    """Of the record."""

    @property
    def ratio(self) -> float:
        """Its time over that of the rule's configuration."""
        return round(over_baseline(self.paired), _DIGITS)

    def over(self, other: "Configured", among: int) -> Difference:
        """Compare with another one of the same head and place; intervals hold together for ``among`` of them."""
        confidence = 1.0 - (1.0 - DECIDING) / max(among - 1, 1)
        found = compare_runs(self.paired, other.paired, confidence=confidence)
        return Difference(*(round(ratio, _DIGITS) for ratio in found))


class Head(NamedTuple):
    """One head of a sweep; what decides of its configurations, by their names."""

    cell: dict[str, Any]
    """Of its shape, and if it was measured in a network, model and tap."""
    alone: dict[str, Configured]
    network: dict[str, Configured]
    """Of the whole network, all other heads with the rule's configuration."""
    tried: dict[str, Configured]
    """Alone, also those that were only looked at."""

    @property
    def network_name(self) -> str:
        """The network, and what all its heads have in common."""
        parts = [self.cell.get("model"), self.cell["dtype"], f"{self.cell['classes']:,} classes"]
        return ", ".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """What it is in its network."""
        where = self.cell.get("tap", f"{self.cell['channels']}x{self.cell['height'] * self.cell['width']}")
        return f"{where}, batch {self.cell['samples']}"


def swept_heads(records: Iterable[Record]) -> list[Head]:
    """Return the heads of sweeps of the kernel that was swept last, in order of batch size, classes and channels.

    Raises:
        BadRecord: a record of a sweep lacks something.
    """
    measured = [one for one in records if one.error is None]
    shapes: dict[str, dict[str, list[Record]]] = {}
    try:
        for one in of_last_kernel(measured):
            shape = json.dumps({name: value for name, value in one.cell.items() if name not in _WHERE})
            shapes.setdefault(shape, {"alone": [], "network": []})[one.protocol["place"]].append(one)
        heads = [_head(its["alone"], its["network"]) for its in shapes.values()]
        return sorted(heads, key=lambda head: [head.cell[name] for name in ("samples", "classes", "channels", "dtype")])
    except (KeyError, TypeError, ValueError) as error:
        raise BadRecord(f"a record of a sweep lacks something, or has it in another form: {error}") from None


def _head(alone: Sequence[Record], network: Sequence[Record]) -> Head:
    if network:  # several are not the same measurement: the last one is drawn
        last = network[-1]
        trunk = last.protocol.get("trunk")
        network = [one for one in network if one.cell == last.cell and one.protocol.get("trunk") == trunk]
    measured_alone = _configured(alone)
    decisive, in_network = (
        {one.variant: one for one in deciding(found)} for found in (measured_alone, _configured(network))
    )
    tried = {one.variant: one for one in sorted(measured_alone, key=times) if one.rule == measured_alone[-1].rule}
    return Head((network or alone)[-1].cell, decisive, in_network, tried)


def _configured(records: Iterable[Record]) -> list[Configured]:
    return [
        Configured(*timed(one), one.protocol["config"], (one.device_us or {})["median"])  # timed says if it has none
        for one in records
    ]
