"""Findings of the host: it waits for the device in the middle of a request, or the device waits for its launches."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import PurePath
from statistics import median
from typing import NamedTuple

from ...measuring.cuda_calls import SYNCHRONISATIONS, is_synchronous_copy
from ...records.intervals import Interval, length, merged
from ..trace import ApiCall, Trace, TracedRequest, Work
from ..user_code import place_in_words
from .finding import Finding, first_few, found, host_marks, lines_of, once_each, times, us
from .requests import Busy, holds, launched_in, set_up

#: What costs less a request is none.
_LEAST_US = 5.0
#: So many waits have a finding each; the others share one.
_MOST = 5
#: The device is idle for more than this share of a request.
_IDLE_SHARE = 0.3
#: At least this share of that, it waits for the next launch.
_WAITING_SHARE = 0.5
#: A kernel that begins so soon after its launch began, or ended, was not waited for by any other.
_AFTER_BEGIN_US, _AFTER_END_US = 15.0, 15.0
#: What a launch of eager PyTorch takes the host without a profiler (12 on ResNet-18, H200); a profiler trebles it.
_LAUNCH_US = 10.0
#: Fewer launches are bound by something else.
_LEAST_LAUNCHES = 10

#: What people write that ends in an operator.
_WRITTEN = {
    "aten::_local_scalar_dense": "`.item()`, `float(tensor)`, `if tensor:` or `print(tensor)`",
    "aten::item": "`.item()`",
    "aten::nonzero": "`nonzero()`, or a mask as an index",
    "aten::masked_select": "`masked_select`",
    "aten::copy_": "`.cpu()`, `.tolist()`, `.numpy()`, or a copy without `non_blocking=True`",
    "aten::_to_copy": "`.cpu()`, or a copy without `non_blocking=True`",
}
#: Remedy and snippet by the operator that waits; None: none does.
_HELP = {
    "aten::nonzero": (
        "Keep shapes fixed: a mask in place of an index needs no wait.",
        "y = torch.where(mask[:, None], a, b)  # in place of a[mask.nonzero()]\n",
    ),
    "aten::copy_": (
        "Copy to pinned memory without waiting, and wait for an event when the request is launched.",
        """\
host = torch.empty(y.shape, dtype=y.dtype, device="cpu", pin_memory=True)  # once
host.copy_(y, non_blocking=True)
copied = torch.cuda.Event()
copied.record()
...  # launch all that is left of the request
copied.synchronize()  # then read host
""",
    ),
    None: (
        "Let streams wait for events, and not the host for streams; wait once, when all is launched.",
        """\
done = torch.cuda.Event()
done.record(side)
torch.cuda.current_stream().wait_event(done)  # in place of synchronize()
""",
    ),
}
_DECIDE = (
    "Leave the decision on the GPU, or read it when all is launched; auxhead's runners leave early without a wait.",
    """\
from auxhead.model import accelerate

fast = accelerate(model, images)  # exits stop the network on the GPU, with no .item()
answer = fast(images)  # read label, confidence, exit_index at the end
""",
)


class HostWait(NamedTuple):
    """A call in which the host waits, with the copy to the host that it waits for."""

    call: ApiCall
    copy: Work | None
    start_us: float
    idle_us: float
    """How long the device has nothing to do for it."""

    @property
    def key(self) -> str:
        """What the waits of one line have in common."""
        return self.call.line or self.call.operator or self.call.name


def blocking_copies(request: TracedRequest) -> list[tuple[ApiCall, Work]]:
    """Return waits that end a copy, each with it: a blocking copy is a copy and then a wait in one operator."""
    by_call = {id(work.call): work for work in request.work if work.kind == "copy"}
    latest: dict[int, ApiCall] = {}
    pairs = []
    for call in request.calls:
        if id(call) in by_call:
            latest[call.thread] = call
        elif call.name in SYNCHRONISATIONS and call.thread in latest:
            copying = latest.pop(call.thread)
            if copying.operator_us is not None and copying.operator_us == call.operator_us:
                pairs.append((call, by_call[id(copying)]))
    return pairs


@cache
def host_waits(request: TracedRequest) -> list[HostWait]:
    """Return the waits after which a request goes on, but for those of copies, captures and cuDNN's trials.

    One before anything was launched belongs to the caller, and one after which little is launched reads the answer,
    unless requests follow one another at once.
    """
    launched, busy, others = launched_in(request), Busy(request.work), set_up(request)
    copies = {id(wait): copy for wait, copy in blocking_copies(request)}
    waits = []
    for call in request.calls:
        if call.name not in SYNCHRONISATIONS or is_synchronous_copy(call.name) or holds(others, call.start_us):
            continue
        copy = copies.get(id(call))
        if copy is not None and "HtoD (Pageable" in copy.name:
            continue
        start = call.start_us if copy is None or copy.call is None else copy.call.start_us
        resumed = launched.next_start(call.end_us)
        inside = launched.kernels_before(start) > 0 and launched.goes_on(call.end_us)
        if request.next_us is not None:  # whoever waits at the end of a request holds up the next one
            resumed, inside = resumed or request.next_us, True
        if resumed is not None and inside:
            resumed = max(start, resumed)
            waits.append(HostWait(call, copy, start, max(0.0, resumed - start - busy.between(start, resumed))))
    return waits


def find_host_waits(trace: Trace) -> Iterator[Finding]:
    """Find lines at which the host waits in the middle of a request: five at most, and one for all others."""

    def cost(keys: set[str]) -> float:
        return trace.median_us(lambda request: sum(wait.idle_us for wait in host_waits(request) if wait.key in keys))

    costs = {key: cost({key}) for key in {wait.key for each in trace.requests for wait in host_waits(each)}}
    keys = sorted((key for key in costs if costs[key] >= _LEAST_US), key=lambda key: (-costs[key], key))
    exact = _exact_lines(trace, keys)
    for group in [[key] for key in keys[:_MOST]] + ([keys[_MOST:]] if keys[_MOST:] else []):
        here = [wait for wait in host_waits(trace.shown) if wait.key in group]
        here = here or [wait for each in trace.requests for wait in host_waits(each) if wait.key in group][:1]
        yield _finding(here, group, cost({*group}), [line for key in sorted(group) for line in exact[key]])


def _finding(waits: list[HostWait], keys: list[str], cost: float, exact: list[str]) -> Finding:
    first = waits[0].call
    evidence = [
        f"{name} {times(count)} a request"
        + (f", in {operator}" if operator else "")
        + (f": {_WRITTEN[operator]}" if operator in _WRITTEN else "")
        for (name, operator), count in Counter((wait.call.name, wait.call.operator) for wait in waits).most_common()
    ]
    if any(wait.copy is not None and "Pageable" in wait.copy.name for wait in waits):
        evidence.append("what it reads is copied to pageable memory")
    evidence.append(f"the device idles for {us(cost)} of a request, from these waits until its next work")
    where = f" at {len(keys)} more places" if len(keys) > 1 else ""
    if not where and not exact and first.line is not None:  # those that are exact stand below
        where = f" {place_in_words(first.line)},"
    return Finding(
        "host-wait",
        f"The host waits for the device{where} and launches the rest only then.",
        first_few(evidence),
        *_HELP.get(first.operator, _DECIDE if first.operator else _HELP[None]),
        cost,
        once_each(exact) or once_each(wait.call.line for wait in waits),
        host_marks((wait.start_us, wait.call.end_us) for wait in waits),
    )


def _exact_lines(trace: Trace, keys: list[str]) -> dict[str, list[str]]:
    """Return, by function, lines at which waits were seen live: each is of the last function to begin before it."""
    lines: dict[str, list[str]] = defaultdict(list)
    for line in lines_of(trace.noticed("host-wait")):
        file, number = _file_and_line(line)
        places = [(key, *_file_and_line(key)) for key in keys]
        # a profiler may have cut off the beginning of a path, and a live line has its end alone
        begins = {
            key: begin for key, of, begin in places if begin <= number and PurePath(of).name == PurePath(file).name
        }
        if begins:
            lines[max(begins, key=begins.__getitem__)].append(line)
    return lines


def _file_and_line(place: str) -> tuple[str, int]:
    """Split ``file.py:12 in forward``; 0 where there is no line."""
    file, _, number = place.partition(" in ")[0].rpartition(":")
    return (file, int(number)) if number.isdecimal() else (file or number, 0)


class Idleness(NamedTuple):
    """How a request's device waits for the host, as the trace has it; times are microseconds."""

    gaps: list[Interval]
    """Pauses that end with a kernel that runs as soon as it is launched."""
    waiting_us: float
    """How long all of these are."""
    idle_us: float
    span_us: float
    busy_us: float
    launches: int


def idleness(request: TracedRequest) -> Idleness:
    """Tell a request's pauses for want of a launch from those in which the host waits or sets something up."""
    busy = Busy(request.work)
    calls = {work.start_us: work.call for work in sorted(request.work, key=lambda work: -work.start_us)}
    copies = [(call.start_us, call.end_us) for call in request.calls if is_synchronous_copy(call.name)]
    waits = [(wait.start_us, wait.call.end_us) for wait in host_waits(request)]
    others = merged([*set_up(request), *copies, *waits])
    gaps = []
    for (_, begin), (end, _) in zip(busy.intervals, busy.intervals[1:], strict=False):
        call = calls[end]
        if call is None or end > max(call.start_us + _AFTER_BEGIN_US, call.end_us + _AFTER_END_US):
            continue
        if not any(start < end and begin < stop for start, stop in others):
            gaps.append((begin, end))
    span_us = busy.intervals[-1][1] - busy.intervals[0][0]
    launches = len({id(work.call) for work in request.work if work.call is not None})
    return Idleness(gaps, length(gaps), span_us - busy.us, span_us, busy.us, launches)


def find_launch_bound(trace: Trace) -> Iterator[Finding]:
    """Find that most requests are bound by their launches: no graph, and a device that waits for the next one."""
    host_us = trace.seen.host_us
    if host_us is not None:  # another process on the host makes some of them longer
        host_us = min([host_us, *trace.seen.samples_us])

    def cost(request: TracedRequest) -> float:
        if not request.work or any(work.graph for work in request.work):
            return 0.0
        seen = idleness(request)
        # a profiler makes launches slower: the time without it is known, or reckoned
        total = seen.launches * _LAUNCH_US if host_us is None else host_us
        idle = min(seen.idle_us, total - seen.busy_us)
        if seen.launches < _LEAST_LAUNCHES or seen.idle_us <= _IDLE_SHARE * seen.span_us:
            return 0.0
        if idle <= _IDLE_SHARE * total or seen.waiting_us < _WAITING_SHARE * seen.idle_us:
            return 0.0
        return idle * seen.waiting_us / seen.idle_us

    cost_us = trace.median_us(cost)
    if not cost_us:
        return
    request = trace.shown
    seen = idleness(request)
    starts = sorted({work.call.start_us for work in request.work if work.call is not None})
    apart = us(median(after - before for before, after in zip(starts, starts[1:], strict=False)))
    taken = us(median([work.us for work in request.kernels] or [0.0]))
    told = "as measured without a profiler" if host_us is not None else "at 10 us a launch, for a profiler adds to it"
    yield found(
        "launch-bound",
        f"The device waits for launches: a kernel takes {taken}, the next one comes after {apart}.",
        (
            f"{seen.launches} launches a request, {apart} apart (median, with the profiler on)",
            f"kernels of {taken} (median), {us(seen.busy_us)} together",
            f"the device is idle for {us(seen.idle_us)} of {us(seen.span_us)} in the trace, for "
            f"{us(seen.waiting_us)} of it because nothing was launched",
            f"cost {told}",
        ),
        cost_us,
        marks=host_marks(seen.gaps),
    )
