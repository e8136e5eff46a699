"""Timelines from records, the kernels of one graph replay with the summary of its run; and as traces for Perfetto."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..autotune.records.output import writing
from ..autotune.records.record import Record
from .records import NoRecords, network_of, read_kinds

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


#: Numbers of the lanes; SMs come last.
_TRUNK_LANE, _SIDE_LANE, _FIRST_SM_LANE = 0, 1, 2
_JOINING = "joining launch: late heads, classifier, answer"
_LANES = {TRUNK: _TRUNK_LANE, SIDE: _SIDE_LANE, JOIN: _TRUNK_LANE}


def write_trace(path: Path, out: Path) -> None:
    """Write the timelines of a file of records as a trace, compressed if its name ends in ".gz".

    Raises what ``read_kinds`` does; ``NoRecords`` names the command that makes them.
    """
    try:
        trace = chrome_trace(read_kinds([path], KINDS))
    except NoRecords as error:
        raise NoRecords(f"{error}; `auxhead-tune overlap MODEL` makes it") from None
    content = (json.dumps(trace) + "\n").encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out) as file:
        file.write(gzip.compress(content, mtime=0) if out.suffix == ".gz" else content)


def chrome_trace(records: Sequence[Record]) -> dict[str, Any]:
    """Return the timelines in the trace event format, each network a process; times are microseconds."""
    found = timelines(records)
    events = [event for pid, timeline in enumerate(found, start=1) for event in _process(pid, timeline)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {name: str(value) for name, value in found[0].record.environment.items()},
    }


def _process(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    of_launch = [*(f"heads of {', '.join(taps)}" for taps in timeline.launches), _JOINING]
    programs = _in_lanes(timeline.replay["programs"])
    lanes = ["trunk (high priority)", "heads (low priority)", *(f"SM {sm}: programs of heads" for sm, _ in programs)]
    yield _metadata(pid, 0, "process_name", {"name": f"{timeline.network}; one replay under torch.profiler"})
    yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})
    for tid, name in enumerate(lanes):
        yield _metadata(pid, tid, "thread_name", {"name": name})
        yield _metadata(pid, tid, "thread_sort_index", {"sort_index": tid})
    names = iter(of_launch)
    for kernel in timeline.replay["kernels"]:
        arguments = {name: kernel[name] for name in ("stream", "grid", "block", "registers")}
        name = kernel["name"]
        if kernel["role"] != TRUNK:
            name, arguments = next(names), {"kernel": name, **arguments}
        yield _complete(pid, _LANES[kernel["role"]], name, kernel["start_us"], kernel["duration_us"], arguments)
    for tid, (sm, of_lane) in enumerate(programs, start=_FIRST_SM_LANE):
        for launch, _, begin, end in of_lane:
            name = of_launch[int(launch)]
            yield _complete(pid, tid, name, begin, round(end - begin, 3), {"SM": sm})


def _in_lanes(programs: Sequence[Sequence[float]]) -> list[tuple[int, list[Sequence[float]]]]:
    """Return lanes in the order of SMs, each as its SM and its programs, one after another.

    An SM has as many lanes as it ran programs at a time: viewers garble programs that overlap in one lane.
    """
    by_sm: dict[int, list[list[Sequence[float]]]] = {}
    for program in sorted(programs, key=lambda one: (one[2], one[3])):
        lanes = by_sm.setdefault(int(program[1]), [])
        free = next((lane for lane in lanes if lane[-1][3] <= program[2]), [])
        if not free:
            lanes.append(free)
        free.append(program)
    return [(sm, lane) for sm in sorted(by_sm) for lane in by_sm[sm]]


def _metadata(pid: int, tid: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _complete(pid: int, tid: int, name: str, begin: float, us: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "gpu", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": us, "args": arguments,
    }  # fmt: skip
