"""``slim``: a trace of torch.profiler without what the doctor's findings do not need, so that it can be kept."""

import gzip
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from auxhead.autotune.doctor.trace import KEY

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
