"""Runs the doctor: makes or reads the trace, finds, prints a diagnosis, and keeps its record."""

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
from ..records.summaries import network_record, summary
from .finding import Finding
from .findings.find_all import find_all
from .findings.per_request import shown_request
from .read_trace import read_trace
from .sources import place_in_words
from .targets.named_target import NamedTarget
from .trace import BadTrace, Call, Request, Trace
from .verdict import Verdict, verdict


def run_doctor(target: NamedTarget, out: Path, *, as_json: bool) -> bool:
    """Diagnose, print and keep; returns whether there are findings. The folder ``out`` is made once there is a trace.

    Raises:
        BadInput: no CUDA device, no such factory, or a target that cannot be diagnosed.
        BadTrace: see there.
    """
    console = plain_console()
    file = target.trace or out / "trace.json.gz"
    if target.trace is None:
        with console.status(f"Running {target.name}"):
            _run(target, file)
    try:
        trace = read_trace(file)
        findings, judged = find_all(trace), verdict(trace)
        record = doctor_record(target.name, trace, shown_request(trace), findings, judged)
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
        kept = "" if target.trace is not None else "trace.json.gz (a Chrome trace, for ui.perfetto.dev), "
        console.print(
            f"Saved in {out}: {kept}doctor.jsonl (a record was appended; `auxhead-plot doctor --records {records}` "
            "draws the last one)",
            soft_wrap=True,
        )
    return bool(findings)


def _run(target: NamedTarget, file: Path) -> None:
    from ..measuring.environment import this_device
    from .watching.operators import noting_captures

    otherwise = "; a trace that was recorded elsewhere can be diagnosed here: auxhead-tune doctor TRACE.json.gz"
    if target.script is not None:
        from .targets.script import profile_script

        this_device(KIND, otherwise)
        with noting_captures():
            profile_script(target.script, target.arguments, file)
    elif target.factory is not None:
        from .profile_live import profile_live
        from .targets.factory import find_target

        make = find_target(target.factory)
        device = this_device(KIND, otherwise)
        with noting_captures():
            made = make(device)
            profile_live(made.request, file, module=made.module)


#: The kind of these records.
KIND = "doctor"
_DIGITS = 3


def doctor_record(target: str, trace: Trace, shown: Request, findings: Sequence[Finding], verdict: Verdict) -> Record:
    """Return the record of what was found.

    Args:
        target: as the command got it.
        trace: that all is made from.
        shown: the request that the marks of the findings are of.
        findings: worst first.
        verdict: of the same trace.
    """
    return network_record(
        KIND,
        {"target": target},
        "doctor",
        _environment(trace),
        run=secrets.token_hex(6),
        host_us=summary([trace.seen.samples_us]) if trace.seen.samples_us else None,
        protocol={"requests": len(trace.requests), "cut_by": trace.cut_by, "stacks": trace.has_stacks},
        measured={
            **dataclasses.asdict(verdict),
            "possible_us": verdict.possible_us,
            "findings": [dataclasses.asdict(one) for one in findings],
            "streams": _streams(trace, shown),
            "calls": [[round(one.start_us, _DIGITS), round(one.end_us, _DIGITS), _role(one)] for one in shown.calls],
        },
    )


def _environment(trace: Trace) -> dict[str, Any]:
    if trace.seen.environment is not None:
        return dict(trace.seen.environment)
    device = trace.devices[0] if trace.devices else {}
    unknown = dict.fromkeys(("driver", "torch", "triton", "cudnn", "cuda"))
    return {"gpu": device.get("name"), "sm_count": device.get("numSms"), **unknown}


def _streams(trace: Trace, shown: Request) -> list[dict[str, Any]]:
    """Return the streams of a request in the order in which they begin, with what each runs."""
    priorities = {one.number: one.priority for one in trace.seen.streams}
    found: dict[tuple[int, int], list[list[Any]]] = {}
    for one in shown.work:
        kind = "head" if one.is_head else one.kind
        of_stream = found.setdefault((one.device, one.stream), [])
        of_stream.append([round(one.start_us, _DIGITS), round(one.end_us, _DIGITS), kind])
    return [
        {"device": device, "stream": stream, "priority": priorities.get(stream), "work": work}
        for (device, stream), work in found.items()
    ]


def _role(call: Call) -> str:
    """Return what a call does: ``launch``, ``wait``, ``allocate`` or ``other``."""
    roles = {"launch": LAUNCHES, "wait": SYNCHRONISATIONS, "allocate": ALLOCATIONS}
    return next((role for role, names in roles.items() if call.name in names), "other")


#: Kinds that only a run tells, not a trace by itself.
LIVE_ONLY = (
    "race",
    "freed-in-use",
    "unrecorded-event",
    "mixed-devices",
    "stream-class",
    "priority",
    "fusible-heads",
)


def print_diagnosis(console: Console, trace: Trace, findings: Sequence[Finding], verdict: Verdict) -> None:
    """Print all of it."""
    requests = len(trace.requests)
    console.print(f"{requests} request{'s' * (requests != 1)}, told by {trace.cut_by}.", soft_wrap=True)
    for line in verdict.sentences():
        console.print(line, soft_wrap=True)
    if not trace.has_stacks:
        console.print("The trace has no source lines: record it with torch.profiler.profile(with_stack=True).")
    if trace.watched is None:
        console.print(f"Not looked for, since a trace does not tell: {', '.join(LIVE_ONLY)}.", soft_wrap=True)
    for number, one in enumerate(findings, start=1):
        console.print()
        _print_finding(console, number, one)
    console.print()
    count = len(findings)
    console.print("No finding." if not count else f"{count} finding{'s' * (count != 1)}.")


def _print_finding(console: Console, number: int, one: Finding) -> None:
    cost = "" if one.cost_us is None else f"  ({one.cost_us:,.0f} us a request)"
    console.print(f"{number}. {one.kind}: {one.what}{cost}", style="bold", soft_wrap=True)
    for line in one.lines:
        console.print(f"   {place_in_words(line)}", soft_wrap=True)
    for line in one.evidence:
        console.print(f"   - {line}", soft_wrap=True)
    console.print(f"   Remedy: {one.remedy}", soft_wrap=True)
    for line in one.snippet.splitlines():
        console.print(f"       {line}", style="cyan", soft_wrap=True)
