"""Heads that a sweep tuned, as figures draw them: the measurements that decide, alone and in the network."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ..autotune.records.comparison import Difference, compare_runs
from ..autotune.records.decisions import (
    Measurement,
    Setting,
    deciding,
    joint_confidence,
    measurement,
    of_last_kernel,
    setting_of,
)
from ..autotune.records.record import Record, bad_record
from .records import Known, read_kinds

#: Fields of a launch configuration that are drawn.
FIELDS = ("num_warps", "block_c")
#: Digits of a ratio: numpy's logarithms differ in their last one from processor to processor, what is drawn must not.
_DIGITS = 9


class Head(NamedTuple):
    """One head of a sweep; its measurements by the names of configurations."""

    cell: dict[str, Any]
    """Fields of its shape, and if it was measured in a network, model and tap."""
    alone: dict[str, Measurement]
    """Those that decide alone."""
    network: dict[str, Measurement]
    """Those that decide in the network: times of all of it, all other heads with the rule's configuration."""
    tried: dict[str, Measurement]
    """Alone, also those that were only looked at."""

    @property
    def network_name(self) -> str:
        """The network, and what all its heads have in common."""
        parts = [self.cell.get("model"), self.cell["dtype"], f"{self.cell['classes']:,} classes"]
        return ", ".join(part for part in parts if part)

    @property
    def name(self) -> str:
        """The head's place in its network, or its size, and its batch."""
        where = self.cell.get("tap", f"{self.cell['channels']}x{self.cell['height'] * self.cell['width']}")
        return f"{where}, batch {self.cell['samples']}"


class Swept(NamedTuple):
    """Records of sweeps and the heads in them, which several figures are drawn from."""

    records: list[Record]
    heads: list[Head]
    """Those of the kernel that was swept last, in order of batch size, classes and channels."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Swept":
        """Find the heads in records."""
        kept = list(records)
        return cls(kept, _heads(kept))


def read_swept(paths: Sequence[Path], kinds: Sequence[str], known: Known) -> Swept:
    """Read records of sweeps, and find the heads in them; raises as ``read_kinds``."""
    key = ("swept", *paths)
    if key not in known:
        known[key] = Swept.of(read_kinds(paths, kinds, known))
    return cast(Swept, known[key])


def over_rule(one: Measurement) -> float:
    """Return a configuration's time over that of the rule's."""
    return round(one.paired.over_baseline, _DIGITS)


def over(one: Measurement, other: Measurement, among: int) -> Difference:
    """Compare two configurations of one head in one place; intervals hold together for ``among`` of them."""
    found = compare_runs(one.paired, other.paired, confidence=joint_confidence(among))
    return Difference(*(round(ratio, _DIGITS) for ratio in found))


def _heads(records: Iterable[Record]) -> list[Head]:
    shapes: dict[tuple[Any, ...], dict[Setting, list[Record]]] = {}
    in_network: dict[tuple[Any, ...], Setting] = {}
    for one in of_last_kernel(one for one in records if one.error is None):
        setting = setting_of(one)
        shapes.setdefault(setting.shape, {}).setdefault(setting, []).append(one)
        if setting.place == "network":  # several are not the same measurement: the last one is drawn
            in_network[setting.shape] = setting
    heads = [_head(settings, in_network.get(shape)) for shape, settings in shapes.items()]
    return sorted(heads, key=lambda head: [head.cell[name] for name in ("samples", "classes", "channels", "dtype")])


def _head(settings: dict[Setting, list[Record]], in_network: Setting | None) -> Head:
    alone = [one for setting, its in settings.items() if setting.place == "alone" for one in its]
    network = [] if in_network is None else settings[in_network]
    tried, timed = _measured(alone), _measured(network)
    by_rounds = sorted(tried, key=lambda one: one.rounds)
    return Head(
        (network or alone)[-1].cell,
        {one.variant: one for one in deciding(tried)},
        {one.variant: one for one in deciding(timed)},
        {one.variant: one for one in by_rounds if one.rule == tried[-1].rule},
    )


def _measured(records: Iterable[Record]) -> list[Measurement]:
    found = []
    for record in records:
        config = record.protocol.get("config")
        if not isinstance(config, dict) or not all(isinstance(config.get(name), int) for name in FIELDS):
            raise bad_record(record, f"protocol.config: got {config!r:.60}, wants fields and their values")
        found.append(measurement(record))
    return found
