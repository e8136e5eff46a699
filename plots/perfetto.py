"""Timelines as a trace that ui.perfetto.dev and chrome://tracing open: lanes of the trunk, of the heads and of SMs."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..autotune.record import Record
from .record_files import NoRecords, read_kinds
from .timelines import JOIN, KINDS, SIDE, TRUNK, Timeline, timelines

#: Lanes, in their order; those of SMs come behind.
_TRUNK_LANE, _SIDE_LANE, _FIRST_SM_LANE = 0, 1, 2
_LANES = {TRUNK: _TRUNK_LANE, SIDE: _SIDE_LANE, JOIN: _TRUNK_LANE}


def write_trace(path: Path, out: Path) -> None:
    """Write the timelines of a file of records as a trace; ``out`` is complete or what was there before.

    Raises:
        NoRecords: no such file, or no timelines in it; names the command that makes them.
        BadRecord: a file that is none of records, or records of several devices or versions.
    """
    try:
        trace = chrome_trace(read_kinds([path], KINDS))
    except NoRecords as error:
        raise NoRecords(f"{error}; `auxhead-tune overlap MODEL` makes it") from None
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(trace) + "\n", encoding="utf-8")
    os.replace(unfinished, out)


def chrome_trace(records: Sequence[Record]) -> dict[str, Any]:
    """Return the timelines in the trace event format, each network a process; times are microseconds.

    Args:
        records: of kinds "timeline" and "overlap".

    Raises:
        NoRecords: no timeline with its summary.
    """
    found = timelines(records)
    events = [event for pid, timeline in enumerate(found, start=1) for event in _process(pid, timeline)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {name: str(value) for name, value in found[0].record.environment.items()},
    }


def _process(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    programs = timeline.replay.get("programs") or []
    sms = sorted({int(sm) for sm, _, _ in programs})
    lanes = {
        _TRUNK_LANE: "trunk (high priority)",
        _SIDE_LANE: "heads (low priority)",
        **{_FIRST_SM_LANE + sm: f"SM {sm}: programs of heads" for sm in sms},
    }
    yield _metadata(pid, 0, "process_name", {"name": f"{timeline.network}; one replay under torch.profiler"})
    yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})
    for tid, name in lanes.items():
        yield _metadata(pid, tid, "thread_name", {"name": name})
        yield _metadata(pid, tid, "thread_sort_index", {"sort_index": tid})
    launches = iter(timeline.launches)
    for kernel in timeline.replay["kernels"]:
        arguments = {name: kernel[name] for name in ("stream", "grid", "block", "registers")}
        name = kernel["name"]
        if kernel["role"] == SIDE:
            taps = next(launches, [])
            name, arguments = f"heads of {', '.join(taps)}", {"kernel": name, "taps": taps, **arguments}
        elif kernel["role"] == JOIN:
            name, arguments = "joining launch: late heads, classifier, answer", {"kernel": name, **arguments}
        yield _complete(pid, _LANES[kernel["role"]], name, kernel["start_us"], kernel["duration_us"], arguments)
    for sm, begin, end in programs:
        yield _complete(pid, _FIRST_SM_LANE + int(sm), "program", begin, round(end - begin, 3), {"SM": int(sm)})


def _metadata(pid: int, tid: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _complete(pid: int, tid: int, name: str, begin: float, us: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "gpu", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": us, "args": arguments,
    }  # fmt: skip
