"""Runs the doctor on what its arguments name: makes or reads a trace, prints a diagnosis, and keeps its record."""

import dataclasses
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ...model.commands.console import plain_console
from ..measuring.cuda_calls import ALLOCATIONS, LAUNCHES, SYNCHRONISATIONS
from ..records.forms import check_record
from ..records.record import Record, append_record
from ..records.summaries import summary
from .diagnosis import Verdict, find_all, spread_of_times, weigh, with_spreads
from .findings.finding import Finding
from .load_trace import load_trace
from .target import NamedTarget
from .trace import BadTrace, Trace
from .user_code import place_in_words

#: The kind of these records.
KIND = "doctor"
_DIGITS = 3
#: Kinds that only a run tells, not a trace by itself.
LIVE_ONLY = (
    *("race", "freed-in-use", "unrecorded-event", "mixed-devices"),
    *("stream-class", "priority", "fusible-heads", "jitter", "garbage-collection", "code-loading", "tf32-off"),
)
#: What calls of the host do.
_ROLES = {"allocate": ALLOCATIONS, "wait": SYNCHRONISATIONS, "launch": LAUNCHES}


def run_doctor(target: NamedTarget, out: Path, *, as_json: bool) -> bool:
    """Diagnose, print and keep; returns whether there are findings. The folder ``out`` is made once there is a trace.

    Raises:
        BadInput: no CUDA device, no such factory, or a target that cannot be diagnosed.
        BadTrace: see there.
    """
    console = plain_console()
    is_trace = target.file is not None and target.arguments is None
    file = target.file if target.file is not None and is_trace else out / "trace.json.gz"
    if not is_trace:
        with console.status(f"Running {target.name}"):
            _run(target, file)
    try:
        trace = load_trace(file)
        findings, judged = with_spreads(trace, find_all(trace)), weigh(trace)
        record = doctor_record(target.name, trace, findings, judged)
        check_record(json.loads(json.dumps(dataclasses.asdict(record))))
    except BadTrace:
        raise
    except Exception as error:  # of many kinds, where a trace is of another form than any that is known
        raise BadTrace(f"{file}: has another form than torch.profiler's traces ({error!r:.200})") from error
    records = out / "doctor.jsonl"
    append_record(records, record)
    if as_json:
        print(json.dumps({"target": target.name, **(record.measured or {})}, indent=2))
    else:
        print_diagnosis(console, trace, findings, judged)
        kept = "" if is_trace else "trace.json.gz (a Chrome trace, for ui.perfetto.dev), "
        console.print(
            f"Saved in {out}: {kept}doctor.jsonl (a record was appended; `auxhead-plot doctor --records {records}` "
            "draws the last one)",
            soft_wrap=True,
        )
    return bool(findings)


def _run(target: NamedTarget, file: Path) -> None:
    from ..measuring.environment import this_device
    from .profile_live import find_target, profile_live
    from .script import profile_script
    from .watching.operators import noting_captures

    make = find_target(target.name) if target.file is None else None
    device = this_device(
        KIND, "; a trace that was recorded elsewhere can be diagnosed here: auxhead-tune doctor TRACE.json.gz"
    )
    with noting_captures():
        if make is not None:
            made = make(device)
            profile_live(made.request, file, module=made.module)
        else:
            assert target.file is not None
            profile_script(target.file, target.arguments or (), file)


def doctor_record(target: str, trace: Trace, findings: Sequence[Finding], verdict: Verdict) -> Record:
    """Return the record of what was found in a trace, findings worst first."""
    roles = {name: role for role, names in _ROLES.items() for name in names}
    calls = [
        [round(one.start_us, _DIGITS), round(one.end_us, _DIGITS), roles.get(one.name, "other")]
        for one in trace.shown.calls
    ]
    device = trace.devices[0] if trace.devices else {}
    unknown = dict.fromkeys(("driver", "torch", "triton", "cudnn", "cuda"))
    return Record(
        KIND,
        {"target": target},
        "doctor",
        run=secrets.token_hex(6),
        environment=dict(
            trace.seen.environment or {"gpu": device.get("name"), "sm_count": device.get("numSms"), **unknown}
        ),
        host_us=summary([trace.seen.samples_us]) if trace.seen.samples_us else None,
        protocol={"requests": len(trace.requests), "cut_by": trace.cut_by, "stacks": trace.has_stacks},
        measured={
            **dataclasses.asdict(verdict),
            "possible_us": verdict.possible_us,
            "spread": spread_of_times(trace),
            "findings": [dataclasses.asdict(one) for one in findings],
            "not_looked_for": not_looked_for(trace),
            "streams": _streams(trace),
            "calls": calls,
        },
    )


def not_looked_for(trace: Trace) -> list[str]:
    """Return the kinds of findings that nothing in a trace tells of."""
    if trace.watched is None:
        return list(LIVE_ONLY)
    return ["code-loading"] if trace.watched.loads is None else []


def _streams(trace: Trace) -> list[dict[str, Any]]:
    """Return the streams of the shown request in the order in which they begin, with what each runs."""
    priorities = {one.number: one.priority for one in trace.seen.streams}
    found: dict[tuple[int, int], list[list[Any]]] = {}
    for one in trace.shown.work:
        kind = "head" if one.is_head else one.kind
        found.setdefault(one.on, []).append([round(one.start_us, _DIGITS), round(one.end_us, _DIGITS), kind])
    return [
        {"device": device, "stream": stream, "priority": priorities.get(stream), "work": work}
        for (device, stream), work in found.items()
    ]


def print_diagnosis(console: Console, trace: Trace, findings: Sequence[Finding], verdict: Verdict) -> None:
    """Print all of it."""

    def say(text: str = "", style: str | None = None) -> None:
        console.print(text, style=style, soft_wrap=True)

    requests, count = len(trace.requests), len(findings)
    say(f"{requests} request{'s' * (requests != 1)}, told by {trace.cut_by}.")
    for line in verdict.sentences():
        say(line)
    if not trace.has_stacks:
        say("The trace has no source lines: record it with torch.profiler.profile(with_stack=True).")
    if kinds := not_looked_for(trace):
        why = "a trace does not tell" if trace.watched is None else "CUPTI was not there, or not for the doctor"
        say(f"Not looked for, since {why}: {', '.join(kinds)}.")
    for number, one in enumerate(findings, start=1):
        cost = "" if one.cost_us is None else f"  ({one.cost_us:,.0f} us a request)"
        say()
        say(f"{number}. {one.kind}: {one.what}{cost}", style="bold")
        for line in (*map(place_in_words, one.lines), *(f"- {line}" for line in one.evidence), f"Remedy: {one.remedy}"):
            say(f"   {line}")
        for line in one.snippet.splitlines():
            say(f"       {line}", style="cyan")
    say()
    say("No finding." if not count else f"{count} finding{'s' * (count != 1)}.")
