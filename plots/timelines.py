"""Timelines from records: the kernels of one graph replay, with the summary of all replays of the same run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..autotune.records.record import Record
from .records import NoRecords, network_of

#: The kinds of records that make up a timeline.
KINDS = ("timeline", "overlap")
#: Roles of kernels: of the trunk, of heads on the side stream, or in the launch that joins both streams.
TRUNK, SIDE, JOIN = "trunk", "side", "join"


class Timeline(NamedTuple):
    """One recorded replay, and the summary of all replays of its run; both with what was ``measured``."""

    record: Record
    replay: dict[str, Any]
    summary: Record
    all_replays: dict[str, Any]

    def kernels(self, role: str) -> list[dict[str, Any]]:
        """Return the kernels of a role in order of time."""
        return [kernel for kernel in self.replay["kernels"] if kernel["role"] == role]

    @property
    def network(self) -> str:
        """The network in words."""
        cell = self.record.cell
        return f"{network_of(self.record)}, batch {cell['batch']}, {cell['classes']:,} classes"

    @property
    def launches(self) -> list[list[str]]:
        """The taps whose heads each launch on the side stream holds."""
        taps = self.record.cell["taps"]
        ends = [taps.index(fork) + 1 for fork in self.record.protocol["forks"]]
        return [taps[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def timelines(records: Sequence[Record]) -> list[Timeline]:
    """Return the last timeline of each network, in the order in which they were measured."""
    of_all = [one for one in records if one.kind == "overlap" and one.error is None]
    summaries = {one.run: (one, one.measured) for one in of_all if one.measured}
    found: dict[tuple[str, ...], Timeline] = {}
    for one in records:
        if one.kind == "timeline" and one.measured is not None and one.run in summaries:
            found.pop(one.key, None)
            found[one.key] = Timeline(one, one.measured, *summaries[one.run])
    if not found:
        raise NoRecords("no timeline with the summary of its run among the records")
    return list(found.values())
