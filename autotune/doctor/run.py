"""Runs the doctor: makes or reads the trace, finds, prints and keeps."""

import json
from collections.abc import Sequence
from pathlib import Path

from ...model.bad_input import BadInput
from ...model.commands.console import plain_console
from ...model.commands.options import make_output_directory
from ..records.record import append_record
from .findings.find_all import find_all
from .findings.per_request import shown_request
from .printing import print_diagnosis
from .read_trace import read_trace
from .record import KIND, doctor_record
from .verdict import verdict

#: What TARGET is for a script.
SCRIPT = "run"
#: How names of traces end.
TRACES = (".json", ".json.gz")


def run_doctor(target: str, script: Sequence[str], out: Path, *, as_json: bool) -> bool:
    """Diagnose, print and keep; returns whether there are findings. The arguments are those of the command.

    Raises:
        BadInput: no CUDA device, no such factory, script or trace, or one that cannot be diagnosed.
        BadTrace: see there.
    """
    console = plain_console()
    named = target if target != SCRIPT else " ".join(script)
    if target.endswith(TRACES):
        file = Path(target)
        if not file.is_file():
            raise BadInput(f"TARGET: {target}: no such file")
        make_output_directory(out)
    else:
        make_output_directory(out)
        file = out / "trace.json.gz"
        from .watching.captures import noting_captures

        with console.status(f"Running {named}"), noting_captures():
            _run(target, script, file)
    trace = read_trace(file)
    findings, judged = find_all(trace), verdict(trace)
    record = doctor_record(named, trace, shown_request(trace), findings, judged)
    append_record(out / "doctor.jsonl", record)
    if as_json:
        print(json.dumps({"target": named, **(record.measured or {})}, indent=2))
    else:
        print_diagnosis(console, trace, findings, judged)
        kept = "" if target.endswith(TRACES) else "trace.json.gz (a Chrome trace, for ui.perfetto.dev), "
        console.print(
            f"Saved in {out}: {kept}doctor.jsonl (appended: a record; `auxhead-plot doctor` draws it)", soft_wrap=True
        )
    return bool(findings)


def _run(target: str, script: Sequence[str], file: Path) -> None:
    from ..measuring.environment import this_device

    otherwise = "; a trace that was recorded elsewhere can be diagnosed here"
    if target == SCRIPT:
        from .script import profile_script

        this_device(KIND, otherwise)
        profile_script(Path(script[0]), script[1:], file)
    else:
        from .profile_live import profile_live
        from .target import find_target

        make = find_target(target)
        made = make(this_device(KIND, otherwise))
        profile_live(made.request, file, module=made.module)
