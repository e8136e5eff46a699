"""Findings of what belongs before the first request: memory, captures, cuDNN's trials."""

from collections import Counter
from collections.abc import Callable, Iterator
from statistics import fmean

from ...measuring.cuda_calls import ALLOCATIONS, CAPTURE_BEGINS, INSTANTIATIONS, POOLED_ALLOCATIONS
from ...records.intervals import Interval, length
from ..trace import ApiCall, Trace, TracedRequest
from .finding import Finding, found, host_marks, once_each, times, us
from .requests import captures, holds, set_up, steady_from_us, trials, where_any


def find_allocations(trace: Trace) -> Iterator[Finding]:
    """Find calls that take memory from the driver or give it back, in most requests."""

    def allocations(request: TracedRequest) -> list[ApiCall]:
        begin, others = steady_from_us(trace, request), set_up(request)
        calls = [call for call in request.calls if call.name in ALLOCATIONS - POOLED_ALLOCATIONS]
        return [call for call in calls if call.start_us >= begin and not holds(others, call.start_us)]

    def host_us(calls: list[ApiCall]) -> float:
        return sum(call.end_us - call.start_us for call in calls)

    cost = trace.median_us(lambda request: host_us(allocations(request)))
    if not cost:
        return
    calls = where_any(trace, allocations)
    counts = Counter(call.name for call in calls)
    evidence = []
    for name, count in counts.most_common():
        of_name = [call for call in calls if call.name == name]
        operators = ", ".join(once_each(call.operator for call in of_name))
        told = f"{name} {times(count)} a request, {us(host_us(of_name))} of the host"
        evidence.append(f"{told}, in {operators}" if operators else told)
    yield found(
        "allocation",
        "Memory is taken from the driver or given back within a request, where most such calls wait for the device: "
        f"{', '.join(counts)}.",
        evidence,
        cost,
        (call.line for call in calls),
        host_marks((call.start_us, call.end_us) for call in calls),
    )


def _mean_or_median_us(trace: Trace, amount: Callable[[TracedRequest], float]) -> float:
    """Return the mean over requests where the doctor ran others before, so that nothing of them is of a first one."""
    return trace.median_us(amount) if trace.watched is None else fmean(map(amount, trace.requests))


def find_recaptures(trace: Trace) -> Iterator[Finding]:
    """Find graphs that are captured, instantiated or updated in most requests; in any where the doctor ran them.

    Before those others have run: a service captures for each new length, and a script's module may be called several
    times a request.
    """

    def stretches(request: TracedRequest) -> list[Interval]:
        begin = steady_from_us(trace, request)
        return [stretch for stretch in captures(request) if stretch[0] >= begin]

    def capturing_us(request: TracedRequest) -> float:
        return length(stretches(request))

    def calls_within(request: TracedRequest) -> list[ApiCall]:
        calls = [call for call in request.calls if call.name in CAPTURE_BEGINS | INSTANTIATIONS]
        return [call for call in calls if holds(stretches(request), call.start_us)]

    cost = _mean_or_median_us(trace, capturing_us)
    if not cost:
        return
    calls = where_any(trace, calls_within)
    counts = Counter(call.name for call in calls)
    yield found(
        "recapture",
        "A graph is captured or instantiated within a request, which costs more than it saves.",
        (
            *(f"{name} {times(count)} a request" for name, count in counts.most_common()),
            f"from the begin of a capture to the end of its instantiation: {us(cost)} of the host a request",
        ),
        cost,
        (call.line for call in calls),
        host_marks(stretches(trace.shown)),
    )


def find_trials(trace: Trace) -> Iterator[Finding]:
    """Find convolutions in which cuDNN measures its algorithms, in most requests."""

    def steady(request: TracedRequest) -> dict[Interval, list[ApiCall]]:
        begin = steady_from_us(trace, request)
        return {span: calls for span, calls in trials(request).items() if span[0] >= begin}

    cost = trace.median_us(lambda request: sum(end - begin for begin, end in steady(request)))
    if not cost:
        return
    convolutions = [calls for request in trace.requests for calls in steady(request).values()]
    calls = [call for of_one in convolutions for call in of_one]
    operators, requests = Counter(of_one[0].operator for of_one in convolutions), len(trace.requests)
    evidence = [f"{name} tries algorithms {count / requests:.1f} times a request" for name, count in operators.items()]
    waits = sum("Synchronize" in call.name for call in calls)
    evidence.append(f"{waits / requests:.0f} waits for trials, and {us(cost)} of the host, a request")
    yield found(
        "cudnn-benchmark",
        "cuDNN tries its algorithms within a request (torch.backends.cudnn.benchmark): it does for each new shape of "
        "input.",
        evidence,
        cost,
        (call.line for call in calls),
        host_marks(steady(trace.shown)),
    )
