"""Findings on what belongs before the loop: captures of graphs, and cuDNN's search for algorithms."""

from collections.abc import Iterator

from ..finding import Finding
from ..trace import Call, Request, Trace
from .causes import Stretch, causes, on_host, times

_BEGIN = "cudaStreamBeginCapture"
_INSTANTIATE = ("cudaGraphInstantiate", "cudaGraphInstantiateWithFlags", "cudaGraphInstantiateWithParams")
_UPDATE = ("cudaGraphExecUpdate",)
_TIMES = "cudaEventSynchronize"
#: Waits for events within one convolution: cuDNN times an algorithm by two.
_SEARCH_EVENTS = 3


def captures(request: Request) -> list[tuple[Call, Call]]:
    """Return the first and the last call of each capture in a request."""
    found: list[tuple[Call, Call]] = []
    began: Call | None = None
    for call in request.calls:
        if call.name == _BEGIN:
            began = call
        elif call.name in _INSTANTIATE:
            found.append((began or call, call))
            began = None
        elif call.name in _UPDATE:
            found.append((call, call))
    return found


def in_capture(request: Request, call: Call) -> bool:
    """Tell whether a call is of a capture; ``torch.cuda.graph`` waits and empties the allocator's cache before it."""
    return any(
        first.start_us - _BEFORE_US <= call.start_us <= last.end_us and call.line == first.line
        or first.start_us <= call.start_us <= last.end_us
        for first, last in captures(request)
    )  # fmt: skip


#: Before a capture begins, what ``torch.cuda.graph`` takes for its preparation at most, microseconds.
_BEFORE_US = 5e4


def in_search(call: Call) -> bool:
    """Tell whether a call that times something, or takes memory for that, is made within a convolution."""
    return call.operator is not None and "convolution" in call.operator


def find_recaptures(trace: Trace) -> list[Finding]:
    """Find graphs that are captured, instantiated or updated in requests."""

    def stretches(request: Request) -> Iterator[Stretch]:
        for first, last in captures(request):
            took = last.end_us - first.start_us
            yield Stretch("capture", took, on_host(first, last.end_us), f"{first.name} to {last.name}", first.line)

    return [
        Finding(
            "recapture",
            "A graph is captured or instantiated within the request, which takes longer than what it saves.",
            (f"{times(cause.times, 'capture')} a request: {'; '.join(cause.evidence)}",),
            "Capture once, for each size of batch, before the loop; copy each input to where the graph reads it.",
            "static_input.copy_(x)\ngraph.replay()  # captured before the loop",
            cause.cost_us,
            cause.lines,
            cause.marks,
        )
        for cause in causes(trace, stretches).values()
    ]


def find_searches(trace: Trace) -> list[Finding]:
    """Find convolutions for which cuDNN tries its algorithms."""

    def stretches(request: Request) -> Iterator[Stretch]:
        groups: list[list[Call]] = []
        before: Call | None = None
        for call in request.calls:
            if in_search(call):
                if before is None or before.operator != call.operator:
                    groups.append([])
                groups[-1].append(call)
            before = call
        for group in groups:
            timed = sum(call.name == _TIMES for call in group)
            if timed >= _SEARCH_EVENTS:
                first, last = group[0], group[-1]
                took = last.end_us - first.start_us
                said = f"{timed} algorithms or more are timed within {first.operator}"
                yield Stretch("search", took, on_host(first, last.end_us), said, first.line)

    return [
        Finding(
            "cudnn-benchmark",
            "cuDNN tries its algorithms within the request: torch.backends.cudnn.benchmark does so for each new shape.",
            cause.evidence,
            "Keep shapes the same, padding what is smaller; warm each of them up before the loop; or turn it off.",
            "torch.backends.cudnn.benchmark = False\n"
            "for shape in shapes:  # or each shape once, before the loop\n"
            "    model(torch.empty(shape, device='cuda'))",
            cause.cost_us,
            cause.lines,
            cause.marks,
        )
        for cause in causes(trace, stretches).values()
    ]
