"""Events of a Chrome trace's file: unpacks and checks it, and sorts its events by category."""

import gzip
import io
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..records.record import MOST_BYTES, no_garbage_collection
from .trace import BadTrace

_GZIP = b"\x1f\x8b"
_CALLS = ("cuda_runtime", "cuda_driver")
_FRAMES = ("user_annotation", "cpu_op", "python_function")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CATEGORIES = frozenset({*_CALLS, *_FRAMES, *_WORK, "cuda_sync"})
#: Categories of other vendors' devices, and their calls under the names of CUDA's categories.
_OTHERS = re.compile(r"(hip|roc|xpu|hpu|mtia|npu|musa|privateuse1)\w*|(?!cuda_)\w+_(runtime|driver)")
_OTHER_CALLS = ("hip", "hsa", "roc")
#: No time in a record may be larger.
_MOST_US = 2.0**63


class Event(NamedTuple):
    """An event with a begin and an end, in microseconds of the trace's own time."""

    category: str
    name: str
    start: float
    end: float
    thread: str
    """Process and thread, of the host."""
    tid: int
    """Of the host's threads; 0 where it is no number."""
    args: Mapping[str, Any]

    def number(self, name: str) -> int | None:
        """Return an argument that is a whole number; None if it is not there or something else."""
        value = self.args.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


class Events(NamedTuple):
    """Events by what they are, each in order of time."""

    annotations: list[Event]
    operators: list[Event]
    functions: list[Event]
    """Of Python; none in a trace without stacks."""
    calls: list[Event]
    work: list[Event]
    synchronisations: list[Event]


def read_content(file: Path) -> dict[str, Any]:
    """Return the object that a trace's file holds, compressed by gzip or not.

    Raises:
        BadTrace: no such file, no JSON, no trace, or more than ``MOST_BYTES``.
    """
    try:
        packed = file.read_bytes()
    except OSError as error:
        raise BadTrace(f"{file}: cannot be read ({error.strerror})") from None
    try:
        with no_garbage_collection():
            # kineto escapes no control characters in names of kernels and files
            content = json.loads(_unpacked(packed, file), strict=False)
    except RecursionError:
        raise BadTrace(f"{file}: is not JSON (nested too deep)") from None
    except ValueError as error:
        if isinstance(error, BadTrace):
            raise
        raise BadTrace(f"{file}: is not JSON ({error}), wants a trace of torch.profiler") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise BadTrace(f'{file}: has no list "traceEvents", wants a trace that torch.profiler exported')
    return content


def _unpacked(content: bytes, file: Path) -> str:
    if content.startswith(_GZIP):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as packed:
                content = packed.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise BadTrace(f"{file}: is compressed and cannot be read ({error}); copy or record it again") from None
    if len(content) > MOST_BYTES:
        raise BadTrace(f"{file}: holds more than {MOST_BYTES:,} bytes; record fewer requests")
    return content.decode("utf-8-sig", errors="replace")


def sorted_events(content: Mapping[str, Any]) -> Events:
    """Return the events that findings are made from; what is no event of these is passed over."""
    with no_garbage_collection():
        found: dict[str, list[Event]] = defaultdict(list)
        for item in content["traceEvents"]:
            if isinstance(item, dict) and item.get("ph") == "X" and str(item.get("cat")) in _CATEGORIES:
                event = _event(item)
                if event is not None:
                    found[event.category].append(event)
        for events in found.values():
            events.sort(key=_begin)
        calls = sorted((event for kind in _CALLS for event in found[kind]), key=_begin)
        work = sorted((event for kind in _WORK for event in found[kind]), key=_begin)
        annotations, operators, functions = (found[kind] for kind in _FRAMES)
        return Events(annotations, operators, functions, calls, work, found["cuda_sync"])


def other_vendor(content: Mapping[str, Any]) -> str | None:
    """Return the first category or call of a trace that tells of a device that is none of CUDA's."""
    for item in content["traceEvents"]:
        category, name = (str(item.get(key)) for key in ("cat", "name")) if isinstance(item, dict) else ("", "")
        if _OTHERS.fullmatch(category.lower()):
            return category
        if category in _CALLS and name.startswith(_OTHER_CALLS):
            return name
    return None


def _begin(event: Event) -> tuple[float, float]:
    """Sort those that begin at once by which ends last: it holds the others."""
    return event.start, -event.end


def _event(item: Mapping[str, Any]) -> Event | None:
    try:
        start, length = float(item["ts"]), float(item.get("dur", 0.0))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    name, args, tid = item.get("name"), item.get("args"), item.get("tid")
    if not isinstance(name, str) or not abs(start) < _MOST_US or not 0.0 <= length < _MOST_US:
        return None
    number = tid if isinstance(tid, int) else 0
    thread = f"{item.get('pid')}/{tid}"
    return Event(item["cat"], name, start, start + length, thread, number, args if isinstance(args, dict) else {})
