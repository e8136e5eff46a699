"""Records the traces that the doctor's findings are tested with where there is no GPU.

``PYTHONPATH=tests python -m support.record_doctor_traces OUT [NAME ...]`` writes ``NAME.json.gz`` for the programs of
``doctor_programs``, for all of them if none is named. It needs a GPU; one program needs two, and is left out elsewhere.
"""

import argparse
import gc
import gzip
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from auxhead.autotune.doctor.profile_live import profile_live
from auxhead.autotune.doctor.trace import KEY
from auxhead.autotune.doctor.watching.operators import noting_captures
from auxhead.model import Runner
from torch import nn

from .doctor_programs.all_programs import PROGRAMS
from .doctor_programs.program import Program

REQUESTS = 2
#: Where this checkout is, for a trace names the files of its lines.
CHECKOUT = str(Path(__file__).parents[2])
#: Of the trace as a whole; not what names the machine, the file or the day.
TOP = ("schemaVersion", "deviceProperties", "with_stack", "cuda_driver_version", "cuda_runtime_version", KEY)
DROPPED_CATEGORIES = {"ac2g", "fwdbwd", "Trace", "gpu_user_annotation"}
#: Numbers by which the profiler joins its own events.
DROPPED_ARGUMENTS = {
    *("External id", "Record function id", "Ev Idx", "Python id", "Python parent id", "Python module id"),
    *("cbid", "queued", "context", "Fwd thread id", "Sequence number", "memory bandwidth (GB/s)"),
}
#: Calls that ask for something, and neither launch nor wait nor take memory.
QUERIES = (
    *("cudaGetErrorString", "cudaPeekAtLastError", "cudaGetLastError", "cudaFuncGetAttributes", "cudaFuncSetAttribute"),
    *("cudaStreamIsCapturing", "cudaStreamGetCaptureInfo", "cudaThreadExchangeStreamCaptureMode", "cudaGetDevice"),
    *("cudaSetDevice", "cudaDeviceGetAttribute", "cudaOccupancy", "cudaPointerGetAttributes", "INVALID"),
)


def slim(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new trace with times from zero on, in order of time."""
    kept = [event for event in trace["traceEvents"] if event.get("ph") == "X" and is_needed(event)]
    begin = math.floor(min(event["ts"] for event in kept))
    events = [
        {**event, "ts": round(event["ts"] - begin, 3), "args": needed_arguments(event)}
        for event in sorted(kept, key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    ]
    return {**{key: trace[key] for key in TOP if key in trace}, "traceEvents": events}


def is_needed(event: Mapping[str, Any]) -> bool:
    """Whether a finding may look at an event."""
    category, name = event.get("cat"), event["name"]
    if category == "python_function":
        return name.startswith("nn.Module: ") or is_users_frame(name)
    if category in ("cuda_runtime", "cuda_driver"):
        return not name.startswith(QUERIES)
    return category not in DROPPED_CATEGORIES


def is_users_frame(name: str) -> bool:
    """Whether ``path/of/file.py(12): function`` is neither PyTorch's nor Python's own; ``<built-in ...>`` is."""
    top = name.partition("(")[0].partition("/")[0].removesuffix(".py")
    return not name.startswith("<") and top != "torch" and top not in sys.stdlib_module_names


def needed_arguments(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.get("args", {}).items() if name not in DROPPED_ARGUMENTS}


def write_slim(trace: Mapping[str, Any], file: Path) -> int:
    """Write a trace without what findings do not need, the same bytes for the same trace; return how many."""
    text = json.dumps(slim(trace), sort_keys=True, separators=(",", ":")).replace(CHECKOUT, "/home/me/auxhead")
    content = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    file.write_bytes(content)
    return len(content)


def profile_program(program: Program, file: Path) -> None:
    """Make a program and profile it as the doctor does for a TARGET, in a process of its own if it takes that."""
    if not program.alone:
        return profile_here(program, file)
    (name,) = (name for name, one in PROGRAMS.items() if one is program)
    code = (
        "import sys, pathlib, support.record_doctor_traces as record\n"
        "record.profile_here(record.PROGRAMS[sys.argv[1]], pathlib.Path(sys.argv[2]))"
    )
    tests = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code, name, str(file)], check=True, env=tests)


def profile_here(program: Program, file: Path) -> None:
    """Make a program and profile it in this process."""
    gc.collect()
    torch.cuda.empty_cache()  # of the program before this one
    torch.manual_seed(0)
    with noting_captures():
        call, x = program.make()
    with torch.no_grad():
        module = call if isinstance(call, nn.Module) else None
        profile_live(lambda: call(x), file, requests=REQUESTS, module=module)
    if isinstance(call, Runner):
        call.close()


def main(out: Path, names: Sequence[str]) -> int:
    """Record the programs; returns how many could not be."""
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names or PROGRAMS:
        program = PROGRAMS[name]
        if torch.cuda.device_count() < program.devices:
            print(f"{name}: left out, GPUs that it takes: {program.devices}")
            continue
        try:
            with tempfile.TemporaryDirectory() as folder:
                whole = Path(folder, "trace.json")
                profile_program(program, whole)
                size = write_slim(json.loads(whole.read_text()), out / f"{name}.json.gz")
            print(f"{name}: {size:,} bytes")
        except Exception:  # the others can be recorded all the same
            failed += 1
            print(f"{name}: failed\n{traceback.format_exc()}")
    print(f"{sum(file.stat().st_size for file in out.glob('*.json.gz')):,} bytes in all, {failed} failed")
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    sys.exit(min(main(arguments.out, arguments.names), 1))
