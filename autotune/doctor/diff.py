"""Compares two diagnoses of one target, from their records: which part got slower or faster, what is new, what is gone.

Nothing here imports torch: records of a GPU are compared anywhere.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from ...model.basics.bad_input import BadInput
from ...model.commands.console import plain_console
from ..records.intervals import Interval
from ..records.record import BadRecord, Record, grouped, made_of, read_records
from .findings.kinds import place_of_finding
from .target import TRACES

#: Columns of the table.
_WIDTH = 80
#: Fields of an environment, beside the GPU, that make times differ.
_VERSIONS = ("driver", "torch", "triton", "cudnn", "cuda", "auxhead", "commit")


class Part(NamedTuple):
    """A time of two diagnoses, or what a finding costs."""

    name: str
    """request, device, "trunk (t1)", "the rest (t2)"; or a finding, "host-wait, net.py"."""
    before_us: float | None
    now_us: float | None
    said: str
    """slower, faster or as before; of a finding also new or gone."""
    change: float | None
    """A share: of a time, what it has grown by; of a finding, what its cost has, of the request's time before."""
    gated: bool = True
    """False: part of a time that is gated itself."""

    def is_over(self, gate: float) -> bool:
        """Tell whether it is slower by more than a share, or a new finding."""
        return self.said == "new" or self.gated and self.said == "slower" and (self.change or 0.0) > gate

    @property
    def in_words(self) -> str:
        """Name and change: ``request (+11.9 %)``."""
        return self.name if self.change is None else f"{self.name} ({_percent(self.change)})"


class Comparison(NamedTuple):
    """Two diagnoses of one target."""

    before: Record
    now: Record
    parts: list[Part]


def run_diff(words: Sequence[str], gate: str | None, *, as_json: bool) -> bool:
    """Compare the two files that ``words`` name, print, and return whether anything is over the gate, such as ``5%``.

    Raises:
        BadInput: not two files, or no percentage.
        BadRecord: see :func:`compare`.
    """
    if len(words) != 2:
        raise BadInput(f"TARGET: got diff and {len(words)} files, wants diff BASELINE.jsonl NOW.jsonl")
    share = None if gate is None else share_of(gate)
    baseline, now = map(Path, words)
    with made_of(words):
        found = compare(baseline, now)
    over = [] if share is None else [part for part in found.parts if part.is_over(share)]
    if as_json:
        told = {"target": found.now.cell["target"], "gate": share, "over": [part.name for part in over]}
        print(json.dumps({**told, "parts": [part._asdict() for part in found.parts]}, indent=2))
    else:
        _print(found, gate, over)
    return bool(over)


def share_of(gate: str) -> float:
    """Return the share that a percentage is, 0.05 for ``5%``.

    Raises:
        BadInput: it is none.
    """
    number = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?) ?%", gate.strip())
    if number is None:
        raise BadInput(f"--gate: got {gate!r}, wants a percentage, such as 5%")
    return float(number[1]) / 100.0


def compare(baseline: Path, now: Path) -> Comparison:
    """Compare the last diagnosis of one file with the last one of the same target in another.

    Differences within the spread of either are none: 20th to 80th percentile of timed requests, least to most of those
    in a trace.

    Raises:
        BadRecord: a file holds no diagnosis; or there are none of one target, on one GPU, both timed without a profiler
            or both with one.
    """
    latest, same = _diagnoses(now)[-1], _diagnoses(baseline)
    for what, of in (("target", _target), ("GPU", _gpu), ("way of timing", _way_of_timing)):
        others = ", ".join(dict.fromkeys(map(of, same)))
        same = [one for one in same if of(one) == of(latest)]
        if not same:
            raise BadRecord(f"{baseline} is of {others}, {now} of {of(latest)}: wants diagnoses of one {what}")
    before = same[-1]
    return Comparison(before, latest, [*_times(before, latest), *_findings(before, latest)])


def _diagnoses(file: Path) -> list[Record]:
    found = [one for one in read_records(file) if one.kind == "doctor" and one.error is None]
    if not found:
        raise BadRecord(f"{file}: holds no diagnosis, wants a doctor.jsonl that auxhead-tune doctor has written")
    return found


def _target(record: Record) -> str:
    """Return the target; of a trace, which may lie in another folder, the file's name."""
    target: str = record.cell["target"]
    return PurePath(target).name if target.endswith(TRACES) else target


def _gpu(record: Record) -> str:
    return str(record.environment["gpu"])


def _way_of_timing(record: Record) -> str:
    return "requests under the profiler" if _measured(record)["profiled"] else "requests without a profiler"


def _measured(record: Record) -> dict[str, Any]:
    return record.measured or {}


def _times(before: Record, now: Record) -> Iterator[Part]:
    split = _measured(before)["is_split"] and _measured(now)["is_split"]
    names = [("request", "achieved_us", True), ("device", "busy_us", True)]
    names += [("trunk (t1)", "trunk_us", False), ("the rest (t2)", "side_us", False)] if split else []
    for name, field, gated in names:
        (was, had), (takes, has) = (_time(record, field) for record in (before, now))
        change = (takes - was) / was if was else None
        yield Part(name, was, takes, _said(had, has), change, gated)


def _time(record: Record, field: str) -> tuple[float, Interval]:
    """Return a time of the verdict, and from where to where it lies."""
    measured, host_us = _measured(record), record.host_us
    busy_us = measured["trunk_us"] + measured["side_us"] - measured["overlapped_us"]
    taken = busy_us if field == "busy_us" else measured[field]
    spread = measured.get("spread", {}).get(field)
    if spread is None and field == "achieved_us" and host_us is not None:  # of records before there were spreads
        spread = host_us["p20"], host_us["p80"]
    return taken, _around(taken, spread)


def _around(value: float, spread: Sequence[float] | None) -> Interval:
    least, most = spread or (value, value)
    return min(least, value), max(most, value)


def _said(had: Interval, has: Interval) -> str:
    if has[0] > had[1]:
        return "slower"
    return "faster" if has[1] < had[0] else "as before"


def _findings(before: Record, now: Record) -> Iterator[Part]:
    """Yield findings, those of one kind in one file paired from the most costly on."""
    of_both = [
        grouped(_measured(record)["findings"], lambda one: place_of_finding(one["kind"], one["lines"]))
        for record in (before, now)
    ]
    request_us, unknown = _measured(before)["achieved_us"], _not_looked_for(before, now)
    for place in dict.fromkeys((*of_both[1], *of_both[0])):
        for was, one in zip_longest(*(found.get(place, []) for found in of_both)):
            if place[0] in unknown and (was is None or one is None):
                continue
            before_us, now_us = (None if each is None else each["cost_us"] for each in (was, one))
            said, change = "as before", None
            if was is None or one is None:
                said = "new" if was is None else "gone"
            elif now_us is not None:
                had = before_us or 0.0  # none could be told: all of it came since
                said = _said(_around(had, was.get("spread_us")), _around(now_us, one.get("spread_us")))
                change = (now_us - had) / request_us
            yield Part(", ".join(filter(None, place)), before_us, now_us, said, change)


def _not_looked_for(*records: Record) -> set[str]:
    """Return the kinds of findings of which one of the records tells nothing."""
    later = ["code-loading"]  # than records that do not say
    return {kind for record in records for kind in _measured(record).get("not_looked_for", later)}


def _percent(share: float) -> str:
    return f"{100.0 * share:+.1f} %"


def _headline(found: Comparison, gate: str | None, over: Sequence[Part]) -> str:
    if gate is not None:
        slower = ", ".join(part.in_words for part in over if part.said == "slower")
        new = ", ".join(part.name for part in over if part.said == "new")
        told = [f"slower by more than {gate}: {slower}"] * bool(slower) + [f"new: {new}"] * bool(new)
        return f"Over the gate; {'; '.join(told)}." if over else f"Within the gate of {gate}."
    by_word = grouped((part for part in found.parts if part.said != "as before"), lambda part: part.said)
    words = [f"{said}: {', '.join(part.in_words for part in parts)}" for said, parts in by_word.items()]
    return f"{'; '.join(words).capitalize()}." if words else "As before."


def _print(found: Comparison, gate: str | None, over: Sequence[Part]) -> None:
    console = plain_console(_WIDTH)
    console.print(_headline(found, gate, over), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", overflow="fold")
    for heading in ("before, us", "now, us", "change"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for part in found.parts:
        times = ("-" if us is None else f"{us:,.1f}" for us in (part.before_us, part.now_us))
        table.add_row(part.name, *times, "-" if part.change is None else _percent(part.change), part.said)
    console.print(table)
    for remark in _remarks(found.before, found.now):
        console.print(remark)


def _remarks(before: Record, now: Record) -> Iterator[str]:
    yield f"{now.cell['target']} on {now.environment['gpu']}; before: {before.utc}, now: {now.utc}."
    yield "As before: within the spread of the requests. Findings change by shares of the request's time."
    if "spread" not in _measured(before) or "spread" not in _measured(now):
        yield "A record is of a version that kept no spread of times on the device and of costs: any difference counts."
    if unknown := sorted(_not_looked_for(before, now)):
        yield f"Not looked for in both, so neither new nor gone: {', '.join(unknown)}."
    for name in _VERSIONS:
        was, has = before.environment.get(name), now.environment.get(name)
        if was != has:
            yield f"{name} was {was} and is {has}."
    cuts = [record.protocol["cut_by"] for record in (before, now)]
    if cuts[0] != cuts[1]:
        yield f"Requests were told by {cuts[0]}, and are told by {cuts[1]}."
