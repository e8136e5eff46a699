"""Stretches of a request in which the host is at something else: captures of graphs, and cuDNN's trials."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Sequence

from ...measuring.cuda_calls import CAPTURE_BEGINS, INSTANTIATIONS, LAUNCHES, SYNCHRONISATIONS
from ...records.intervals import Interval, merged
from ..trace import Call, Request

#: Launches that torch.cuda.graph makes itself between the wait that it begins with and the capture: random states.
_LAUNCHES_BEFORE_CAPTURE = 4
#: So many waits for events, or for the device, in one convolution are trials.
_LEAST_TRIALS = 3


def captures(request: Request) -> list[Interval]:
    """Return when graphs are captured or instantiated, with the wait that torch.cuda.graph begins with."""
    found: list[Interval] = []
    begin: float | None = None
    waited: float | None = None
    launches = 0
    for call in request.calls:
        if call.name in CAPTURE_BEGINS:
            if begin is None:
                near = waited is not None and launches <= _LAUNCHES_BEFORE_CAPTURE
                begin = waited if near else call.start_us
        elif call.name in INSTANTIATIONS:
            found.append((call.start_us if begin is None else begin, call.end_us))
            begin = waited = None
        elif call.name in ("cudaDeviceSynchronize", "cuCtxSynchronize"):
            waited, launches = call.start_us, 0
        launches += call.name in LAUNCHES
    return merged(found)


def trials(request: Request) -> dict[Interval, list[Call]]:
    """Return the convolutions, by begin and end, in which cuDNN measures its algorithms, with their calls."""
    by_operator: dict[Interval, list[Call]] = defaultdict(list)
    for call in request.calls:
        if call.operator is not None and call.operator_us is not None and "convolution" in call.operator:
            by_operator[call.operator_us].append(call)
    return {span: calls for span, calls in by_operator.items() if _are_trials(calls)}


def _are_trials(calls: list[Call]) -> bool:
    counts = Counter(call.name for call in calls)
    return max((counts[name] for name in SYNCHRONISATIONS), default=0) >= _LEAST_TRIALS


def set_up(request: Request) -> list[Interval]:
    """Return all of these, in which waits and allocations are theirs."""
    return merged([*captures(request), *trials(request)])


def holds(stretches: Sequence[Interval], time: float) -> bool:
    """Tell whether a time lies in one of disjoint stretches in order."""
    index = bisect.bisect_right(stretches, (time, float("inf"))) - 1
    return index >= 0 and time < stretches[index][1]
