"""Runs the doctor: makes or reads the trace, finds, prints and keeps."""

import dataclasses
import json
from pathlib import Path

from ...model.commands.console import plain_console
from ..records.forms import check_record
from ..records.record import append_record
from .findings.find_all import find_all
from .findings.per_request import shown_request
from .printing import print_diagnosis
from .read_trace import read_trace
from .record import KIND, doctor_record
from .targets.named_target import NamedTarget
from .trace import BadTrace
from .verdict import verdict


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
    from .watching.captures import noting_captures

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
