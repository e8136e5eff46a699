"""Findings on memory: taken from the driver within requests."""

from collections.abc import Iterator

from ...measuring.cuda_calls import ALLOCATIONS
from ..finding import Finding
from ..trace import Request, Trace
from .causes import Stretch, causes, on_host, times
from .graphs import in_capture, in_search


def find_allocations(trace: Trace) -> list[Finding]:
    """Find memory that is taken from the driver, or given back, in each request: PyTorch's own cache does neither."""

    def stretches(request: Request) -> Iterator[Stretch]:
        for call in request.calls:
            if call.name in ALLOCATIONS and not in_search(call) and not in_capture(request, call):
                yield Stretch(call.line or "", call.end_us - call.start_us, on_host(call), call.name, call.line)

    return [
        Finding(
            "allocation",
            "Memory is taken from the driver or given back within the request; most such calls wait for the device.",
            (f"{times(cause.times, 'call')} a request: {', '.join(cause.evidence)}",),
            "Allocate once, before the loop, and write into it; do not empty PyTorch's cache; pin memory once.",
            "buffer = torch.empty(shape, pin_memory=True)  # before the loop\nbuffer.copy_(source)",
            cause.cost_us,
            cause.lines,
            cause.marks,
        )
        for cause in list(causes(trace, stretches).values())[:5]
    ]
