"""Waits of the host for the device in the middle of a request."""

from collections import Counter, defaultdict
from pathlib import PurePath
from typing import NamedTuple

from ...measuring.cuda_calls import SYNCHRONISATIONS
from ..finding import Finding, Mark
from ..sources import place_in_words
from ..trace import Call, Request, Trace, Work
from .device import Busy, Launched
from .per_request import first_few, median_us, noticed, once_each, shown_request, times, us
from .stretches import holds, set_up

#: What costs less a request is none.
_LEAST_US = 5.0
#: So many waits have a finding each; the others share one.
_MOST = 5

#: What people write that ends in an operator.
_WRITTEN = {
    "aten::_local_scalar_dense": "`.item()`, `float(tensor)`, `if tensor:` or `print(tensor)`",
    "aten::item": "`.item()`",
    "aten::nonzero": "`nonzero()`, or a mask as an index",
    "aten::masked_select": "`masked_select`",
    "aten::copy_": "`.cpu()`, `.tolist()`, `.numpy()`, or a copy without `non_blocking=True`",
    "aten::_to_copy": "`.cpu()`, or a copy without `non_blocking=True`",
}
_SNIPPETS = {
    "aten::nonzero": (
        "Keep shapes fixed: a mask in place of an index needs no wait.",
        "y = torch.where(mask[:, None], a, b)  # in place of a[mask.nonzero()]\n",
    ),
    "aten::copy_": (
        "Copy to pinned memory without waiting, and wait for an event when the request is launched.",
        'host = torch.empty(y.shape, dtype=y.dtype, device="cpu", pin_memory=True)  # once\n'
        "host.copy_(y, non_blocking=True)\n"
        "copied = torch.cuda.Event()\n"
        "copied.record()\n"
        "...  # launch all that is left of the request\n"
        "copied.synchronize()  # then read host\n",
    ),
    None: (
        "Let streams wait for events, and not the host for streams; wait once, when all is launched.",
        "done = torch.cuda.Event()\n"
        "done.record(side)\n"
        "torch.cuda.current_stream().wait_event(done)  # in place of synchronize()\n",
    ),
}
_DECIDE = (
    "Leave the decision on the GPU, or read it when all is launched; auxhead's runners leave early without a wait.",
    "from auxhead.model import accelerate\n\n"
    "fast = accelerate(model, images)  # exits stop the network on the GPU, with no .item()\n"
    "answer = fast(images)  # read label, confidence, exit_index at the end\n",
)


class HostWait(NamedTuple):
    """A call in which the host waits, with the copy to the host that it waits for."""

    call: Call
    copy: Work | None
    start_us: float
    idle_us: float
    """How long the device has nothing to do for it."""

    @property
    def key(self) -> str:
        """What the waits of one line have in common."""
        return self.call.line or self.call.operator or self.call.name


def blocking_copies(request: Request) -> list[tuple[Call, Work]]:
    """Return waits that end a copy, each with it: a blocking copy is a copy and then a wait in one operator."""
    by_call = {id(work.call): work for work in request.work if work.kind == "copy"}
    latest: dict[int, Call] = {}
    found = []
    for call in request.calls:
        if id(call) in by_call:
            latest[call.thread] = call
        elif call.name in SYNCHRONISATIONS and call.thread in latest:
            copying = latest.pop(call.thread)
            if copying.operator_us is not None and copying.operator_us == call.operator_us:
                found.append((call, by_call[id(copying)]))
    return found


def host_waits(request: Request) -> list[HostWait]:
    """Return the waits after which a request goes on, but for those of uploads, captures and cuDNN's trials.

    One before anything was launched belongs to the caller, and one after which little is launched reads the answer,
    unless requests follow one another at once.
    """
    launched, busy, others = Launched(request), Busy(list(request.work)), set_up(request)
    copies = {id(wait): copy for wait, copy in blocking_copies(request)}
    found = []
    for call in request.calls:
        if call.name not in SYNCHRONISATIONS or holds(others, call.start_us):
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
            found.append(HostWait(call, copy, start, busy.idle(start, max(start, resumed))))
    return found


def find_host_waits(trace: Trace) -> list[Finding]:
    """Find lines at which the host waits in the middle of a request: five at most, and one for all others."""
    waits = {id(request): host_waits(request) for request in trace.requests}

    def cost(keys: set[str]) -> float:
        return median_us(trace, lambda request: sum(w.idle_us for w in waits[id(request)] if w.key in keys))

    costs = {key: cost({key}) for key in {wait.key for each in waits.values() for wait in each}}
    keys = sorted((key for key in costs if costs[key] >= _LEAST_US), key=lambda key: (-costs[key], key))
    groups = [{key} for key in keys[:_MOST]] + ([set(keys[_MOST:])] if keys[_MOST:] else [])
    exact = _exact_lines(trace, keys)
    shown = waits[id(shown_request(trace))]
    every = [wait for each in waits.values() for wait in each]
    return [
        _finding(
            [wait for wait in shown if wait.key in group] or [w for w in every if w.key in group][:1],
            group,
            cost(group),
            [line for key in sorted(group) for line in exact[key]],
        )
        for group in groups
    ]


def _finding(waits: list[HostWait], group: set[str], cost: float, exact: list[str]) -> Finding:
    lines = once_each(exact) or once_each(wait.call.line for wait in waits)
    ways = Counter((wait.call.name, wait.call.operator) for wait in waits)
    evidence = [
        f"{name} {times(count)} a request"
        + (f", in {operator}" if operator else "")
        + (f": {_WRITTEN[operator]}" if operator in _WRITTEN else "")
        for (name, operator), count in ways.most_common()
    ]
    if any(wait.copy is not None and "Pageable" in wait.copy.name for wait in waits):
        evidence.append("what it reads is copied to pageable memory")
    evidence.append(f"the device idles for {us(cost)} of a request, from these waits until its next work")
    where = ""
    if len(group) > 1:
        where = f" at {len(group)} more places"
    elif not exact and waits[0].call.line is not None:  # those that are exact stand below
        where = f" {place_in_words(waits[0].call.line)},"
    operator = waits[0].call.operator
    remedy, snippet = _SNIPPETS.get(operator, _DECIDE if operator else _SNIPPETS[None])
    return Finding(
        kind="host-wait",
        what=f"The host waits for the device{where} and launches the rest only then.",
        evidence=first_few(evidence),
        remedy=remedy,
        snippet=snippet,
        cost_us=cost,
        lines=lines,
        marks=tuple(Mark(wait.start_us, wait.call.end_us, None) for wait in waits),
    )


def _exact_lines(trace: Trace, keys: list[str]) -> dict[str, list[str]]:
    """Return, by function, lines at which waits were seen live: each is of the last function to begin before it."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in once_each(line for one in noticed(trace, "host-wait") for line in one.lines):
        file, _, number = line.partition(" in ")[0].rpartition(":")
        if not number.isdecimal():
            continue
        begins = {}
        for key in keys:
            of_key, _, first = key.partition(" in ")[0].rpartition(":")
            first = first if first.isdecimal() else "0"
            of_key = of_key or key.partition(" in ")[0]
            if _same_file(file, of_key) and int(first) <= int(number):
                begins[key] = int(first)
        if begins:
            found[max(begins, key=lambda key: begins[key])].append(line)
    return found


def _same_file(one: str, other: str) -> bool:
    """Compare paths of which a profiler may have cut off the beginning."""
    a, b = PurePath(one).parts, PurePath(other).parts
    shorter = min(len(a), len(b))
    return shorter > 0 and a[-shorter:] == b[-shorter:]
