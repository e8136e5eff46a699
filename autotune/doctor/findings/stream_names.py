"""Names of streams in evidence: the default stream, or ``stream 21`` by its number in the trace, as in the figure."""

import re

from ..trace import Trace

#: The number that CUPTI gives the default stream of a process's first device.
_DEFAULT = 7
_HANDLE = re.compile(r"\bstream (0x[0-9a-f]+)")


def stream_name(trace: Trace, device: int, number: int) -> str:
    """Return what a stream of a trace is called in evidence."""
    used = () if trace.watched is None else trace.watched.streams
    handles = {use.handle for use in used if (use.device, use.number) == (device, number)}
    is_default = handles == {0} if handles else number == _DEFAULT
    return "the default stream" if is_default else f"stream {number}"


def by_number(trace: Trace, evidence: str) -> str:
    """Return evidence that watching wrote, in which streams are named by handles, with their numbers in the trace."""
    used = () if trace.watched is None else trace.watched.streams
    numbers = {f"{use.handle:#x}": use.number for use in used if use.number is not None}
    return _HANDLE.sub(lambda found: f"stream {numbers.get(found[1], found[1])}", evidence)
