"""Findings of what belongs before the first request: captures of graphs, and cuDNN's choice of algorithms."""

from collections import Counter
from statistics import fmean

from ...measuring.cuda_calls import CAPTURE_BEGINS, INSTANTIATIONS
from ...records.intervals import Interval, length
from ..finding import Finding, Mark
from ..trace import Call, Request, Trace
from .per_request import first_few, median_us, once_each, shown_request, steady_from_us, times, us
from .stretches import captures, holds, trials


def find_recaptures(trace: Trace) -> list[Finding]:
    """Find graphs that are captured, instantiated or updated in most requests; in any where the doctor ran them.

    Before those others have run: a service captures for each new length, and a script's module may be called several
    times a request.
    """

    def stretches(request: Request) -> list[Interval]:
        begin = steady_from_us(trace, request)
        return [stretch for stretch in captures(request) if stretch[0] >= begin]

    def capturing_us(request: Request) -> float:
        return length(stretches(request))

    cost = median_us(trace, capturing_us) if trace.watched is None else fmean(map(capturing_us, trace.requests))
    if not cost:
        return []
    request = shown_request(trace)
    if not stretches(request):
        request = next(each for each in trace.requests if stretches(each))
    shown = stretches(request)
    calls = [
        call for call in request.calls if call.name in CAPTURE_BEGINS | INSTANTIATIONS and holds(shown, call.start_us)
    ]
    counts = Counter(call.name for call in calls)
    return [
        Finding(
            kind="recapture",
            what="A graph is captured or instantiated within a request, which costs more than it saves.",
            evidence=(
                *(f"{name} {times(count)} a request" for name, count in counts.most_common()),
                f"from the begin of a capture to the end of its instantiation: {us(cost)} of the host a request",
            ),
            remedy="Capture once for each shape of input, keep the graph, and write each request's input into the "
            "tensor that it was captured with.",
            snippet="graphs = {}  # by shape, kept\n"
            "if x.shape not in graphs:\n"
            "    static, graph = x.clone(), torch.cuda.CUDAGraph()\n"
            "    with torch.cuda.graph(graph):\n"
            "        out = model(static)\n"
            "    graphs[x.shape] = static, graph, out\n"
            "static, graph, out = graphs[x.shape]\n"
            "static.copy_(x)\n"
            "graph.replay()\n",
            cost_us=cost,
            lines=once_each(call.line for call in calls),
            marks=tuple(Mark(begin, end, None) for begin, end in shown) if request is shown_request(trace) else (),
        )
    ]


def find_trials(trace: Trace) -> list[Finding]:
    """Find convolutions in which cuDNN measures its algorithms, in most requests."""

    def found(request: Request) -> dict[Interval, list[Call]]:
        begin = steady_from_us(trace, request)
        return {span: calls for span, calls in trials(request).items() if span[0] >= begin}

    cost = median_us(trace, lambda request: sum(end - begin for begin, end in found(request)))
    if not cost:
        return []
    shown = found(shown_request(trace))
    calls = [call for each in trace.requests for of_one in found(each).values() for call in of_one]
    operators = Counter(of_one[0].operator for each in trace.requests for of_one in found(each).values())
    requests = len(trace.requests)
    evidence = [f"{name} tries algorithms {count / requests:.1f} times a request" for name, count in operators.items()]
    waits = sum("Synchronize" in call.name for call in calls)
    evidence.append(f"{waits / requests:.0f} waits for trials, and {us(cost)} of the host, a request")
    return [
        Finding(
            kind="cudnn-benchmark",
            what="cuDNN tries its algorithms within a request (torch.backends.cudnn.benchmark): it does for each new "
            "shape of input.",
            evidence=first_few(evidence),
            remedy="Give inputs of few shapes, each once before the requests that count, or turn the trials off.",
            snippet="torch.backends.cudnn.benchmark = False  # or, for shapes that are known:\n"
            "for size in sizes:\n"
            "    model(torch.zeros(size, device=device))  # once, before the first request\n",
            cost_us=cost,
            lines=once_each(call.line for call in calls),
            marks=tuple(Mark(begin, end, None) for begin, end in shown),
        )
    ]
