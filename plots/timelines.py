"""Timelines in records: the kernels of one replay of a network, with the summary of all replays of the same run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..autotune.records.record import Record
from .records import NoRecords, network_of

#: The kinds of records that hold them.
KINDS = ("timeline", "overlap")
#: Whose a kernel is: the trunk's, of heads beside it, of the launch that waits for both.
TRUNK, SIDE, JOIN = "trunk", "side", "join"


class Timeline(NamedTuple):
    """One replay, and what all of them say."""

    record: Record
    replay: dict[str, Any]
    """What was measured, of a record of kind "timeline"."""
    summary: Record
    all_replays: dict[str, Any]
    """What was measured, of the summary."""

    def kernels(self, role: str) -> list[dict[str, Any]]:
        """Return the kernels of a role, in order."""
        return [kernel for kernel in self.replay["kernels"] if kernel["role"] == role]

    @property
    def network(self) -> str:
        """In words."""
        cell = self.record.cell
        return f"{network_of(self.record)}, batch {cell['batch']}, {cell['classes']:,} classes"

    @property
    def launches(self) -> list[list[str]]:
        """The taps of each launch beside the trunk: all since the one before."""
        taps = self.record.cell["taps"]
        ends = [taps.index(fork) + 1 for fork in self.record.protocol["forks"]]
        return [taps[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def timelines(records: Sequence[Record]) -> list[Timeline]:
    """Return the last timeline of each network, in the order of their measurement.

    Raises:
        NoRecords: none that has its summary beside it.
    """
    summaries = {
        one.run: (one, one.measured) for one in records if one.kind == "overlap" and one.error is None and one.measured
    }
    found: dict[tuple[str, ...], Timeline] = {}
    for one in records:
        if one.kind == "timeline" and one.measured is not None and one.run in summaries:
            found.pop(one.key, None)
            found[one.key] = Timeline(one, one.measured, *summaries[one.run])
    if not found:
        raise NoRecords("no timeline with the summary of its run among the records")
    return list(found.values())
