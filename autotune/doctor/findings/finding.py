"""``Finding``: what is wrong, how that is known, what it costs, what to do; and the table of their kinds."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...records.intervals import Interval
from ..trace import Noticed, Trace, Work


@dataclass(frozen=True)
class Mark:
    """A stretch of the shown request that a finding is about, for the timeline."""

    start_us: float
    """Since the request began."""
    end_us: float
    stream: int | None
    """Its number in the trace; None: the host."""


@dataclass(frozen=True)
class Finding:
    """One thing that keeps work from overlapping, or makes it wrong."""

    kind: str
    """One of :data:`KINDS`."""
    what: str
    """One sentence."""
    evidence: tuple[str, ...]
    """Kernels, times, streams; a line each."""
    remedy: str
    """One or two sentences."""
    snippet: str
    """Python that shows the remedy."""
    cost_us: float | None = None
    """Of a request; None: not told in time (a wrong answer, or unknown)."""
    lines: tuple[str, ...] = ()
    """Source lines that cause it, ``file.py:12``; none where the trace has no stacks."""
    marks: tuple[Mark, ...] = ()


class Kind(NamedTuple):
    """What a kind of finding is, and what helps."""

    what: str
    remedy: str = ""
    snippet: str = ""


#: What findings are about; those that make answers wrong first.
KINDS = {
    "race": Kind(
        "streams read and write one tensor without order",
        "Let the stream that comes second wait for the one that comes first: else the answer is right by luck.",
        "other = torch.cuda.current_stream()\nother.wait_stream(side)  # before what side has written is read\n",
    ),
    "freed-in-use": Kind(
        "a tensor is freed while another stream uses it",
        "Tell the allocator that the other stream uses the tensor, or keep it until the streams are joined.",
        "x.record_stream(side)  # its memory is reused only when side has done with it; or keep x until then\n",
    ),
    "unrecorded-event": Kind(
        "an event is waited for before it is recorded",
        "An event that was never recorded is no wait: record it behind the work, and wait for it after that.",
        """\
event = torch.cuda.Event()
event.record(producer)  # behind what is waited for
consumer.wait_event(event)  # only then
""",
    ),
    "mixed-devices": Kind(
        "streams of several devices mixed up",
        "Make each device's streams and events on it, and be on it while work is launched there.",
        """\
with torch.cuda.device(x.device):
    stream = torch.cuda.Stream(x.device)
    with torch.cuda.stream(stream):
        y = f(x)
""",
    ),
    "default-stream": Kind(
        "work meant for another stream runs on the one that all else runs on",
        "Launch what is to run beside the rest inside of the context of its stream, between a wait of that "
        "stream for its input and a wait for its result.",
        """\
side = torch.cuda.Stream(priority=0)  # once; the trunk's has priority=-1
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    answer = head(x)
y = next_block(x)  # beside it
torch.cuda.current_stream().wait_stream(side)
""",
    ),
    "stream-class": Kind(
        "the class torch.cuda.Stream(s) in place of the context torch.cuda.stream(s)",
        "`torch.cuda.Stream(s)` makes a stream; `torch.cuda.stream(s)` is the context that runs a block on s.",
        "with torch.cuda.stream(s):  # a small s\n    y = head(x)\n",
    ),
    "priority": Kind(
        "the side stream is not lower in priority than the trunk",
        "Run the trunk on a stream of higher priority: the default stream has the lowest there is, so that none can be "
        "lower.",
        """\
trunk = torch.cuda.Stream(priority=-1)  # sooner
side = torch.cuda.Stream(priority=0)  # later
trunk.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(trunk):
    y = model(x)  # forks its heads to side
torch.cuda.current_stream().wait_stream(trunk)
""",
    ),
    "launch-bound": Kind(
        "kernels are shorter than their launches",
        "Launch the request as one CUDA graph, or less and larger kernels: torch.compile, a larger batch, "
        "heads of one launch. Streams gain nothing while launches are what takes the time.",
        """\
# 1. an EarlyExitNetwork: a runner is such a graph
from auxhead.model import make_runner

runner = make_runner(network, x)
out = runner(x)  # in each request

# 2. any other model
graph, static = torch.cuda.CUDAGraph(), x.clone()
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.no_grad(), torch.cuda.stream(side):
    model(static)  # warm-up
torch.cuda.current_stream().wait_stream(side)
with torch.no_grad(), torch.cuda.graph(graph):
    out = model(static)
static.copy_(x)  # in each request
graph.replay()
""",
    ),
    "host-wait": Kind("the host waits for the device within a request"),  # what helps depends on how it waits
    "allocation": Kind(
        "memory is taken from the driver within a request",
        "Take it once, before the first request, and write into it; call neither torch.cuda.empty_cache() "
        "nor pin_memory() in the loop, which make PyTorch give back what it would use again.",
        """\
pinned = torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)  # once
x = torch.empty(batch.shape, dtype=batch.dtype, device=device)
pinned.copy_(batch)  # in each request
x.copy_(pinned, non_blocking=True)
""",
    ),
    "pageable-copy": Kind(
        "copies from or to pageable memory within a request",
        "Keep what is copied in pinned memory, and copy with non_blocking=True; a DataLoader does it with "
        "pin_memory=True.",
        """\
pinned = batch.pin_memory()  # once, or DataLoader(..., pin_memory=True)
x = pinned.to(device, non_blocking=True)
""",
    ),
    "full-device": Kind(
        "kernels fill all SMs, so that nothing runs beside them",
        "No stream makes room on a full device: make the side's work smaller (one launch a head), or run it "
        "where the trunk is small, behind later layers or at smaller batches.",
        """\
from auxhead.model import fuse_aux_heads

report = fuse_aux_heads(model)  # each head one launch of a few blocks
print(report.replaced.keys(), report.left_alone)
""",
    ),
    "gate-waits": Kind(
        "a head is on the critical path of a gate",
        "Let the segment after the head run beside it, and ask for the answer one segment later: a gate "
        "then costs nothing, and skips all but that segment. auxhead's runners ask where it pays.",
        """\
from auxhead.model import EarlyExitNetwork, make_runner

network = EarlyExitNetwork(backbone, heads, rules=0.9)
with make_runner(network, images) as runner:
    answer = runner(images)
""",
    ),
    "fusible-heads": Kind(
        "heads that could be fused",
        "Swap them in place, with their parameters; or let an EarlyExitNetwork run them beside the trunk.",
        """\
from auxhead.model import fuse_aux_heads

report = fuse_aux_heads(model, include={names})
print(report.replaced.keys(), report.left_alone)
""",
    ),
    "recapture": Kind(
        "a graph is captured or instantiated within a request",
        "Capture once for each shape of input, keep the graph, and write each request's input into the "
        "tensor that it was captured with.",
        """\
graphs = {}  # by shape, kept
if x.shape not in graphs:
    static, graph = x.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(static)
    graphs[x.shape] = static, graph, out
static, graph, out = graphs[x.shape]
static.copy_(x)
graph.replay()
""",
    ),
    "cudnn-benchmark": Kind(
        "cuDNN tries its algorithms within a request",
        "Give inputs of few shapes, each once before the requests that count, or turn the trials off.",
        """\
torch.backends.cudnn.benchmark = False  # or, for shapes that are known:
for size in sizes:
    model(torch.zeros(size, device=device))  # once, before the first request
""",
    ),
}
#: Kinds that make answers wrong.
WRONG = ("race", "freed-in-use", "unrecorded-event", "mixed-devices")


def found(
    kind: str,
    what: str,
    evidence: Iterable[str],
    cost_us: float | None = None,
    lines: Iterable[str | None] = (),
    marks: Iterable[Mark] = (),
) -> Finding:
    """Return a finding with what helps against its kind; of the evidence five lines, of the lines each once."""
    _, remedy, snippet = KINDS[kind]
    return Finding(kind, what, first_few(evidence), remedy, snippet, cost_us, once_each(lines), tuple(marks))


def sentence(kind: str) -> str:
    """Return what a kind is, as the begin of a sentence."""
    what = KINDS[kind].what
    return what[0].upper() + what[1:]


def marks_of(work: Iterable[Work]) -> tuple[Mark, ...]:
    """Return marks of work on its streams."""
    return tuple(Mark(one.start_us, one.end_us, one.stream) for one in work)


def host_marks(spans: Iterable[Interval]) -> tuple[Mark, ...]:
    """Return marks of times on the host."""
    return tuple(Mark(begin, end, None) for begin, end in spans)


def lines_of(seen: Iterable[Noticed]) -> tuple[str, ...]:
    """Return the lines of what was noticed, each once."""
    return once_each(line for one in seen for line in one.lines)


def once_each(lines: Iterable[str | None]) -> tuple[str, ...]:
    """Return lines in order, each once."""
    return tuple(dict.fromkeys(line for line in lines if line))


def first_few(lines: Iterable[str], most: int = 5) -> tuple[str, ...]:
    """Return so many lines, and how many more there are."""
    lines = tuple(lines)
    return (*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else []))


def us(amount: float) -> str:
    """Write a time: ``1,234.5 us``."""
    return f"{amount:,.1f} us"


def times(count: int) -> str:
    """Write how often: ``once``, ``7 times``."""
    return "once" if count == 1 else f"{count} times"


def short_name(work: Work) -> str:
    """Return a kernel's name without its types and arguments."""
    name, changes = work.name.removeprefix("void "), 1
    while changes:
        name, changes = re.subn(r"[<(][^<>()]*[>)]", "", name)
    return (re.split("[<(]", name)[0] or work.name)[:60]


#: The number that CUPTI gives the default stream of a process's first device.
_DEFAULT = 7
_HANDLE = re.compile(r"\bstream (0x[0-9a-f]+)")


def stream_name(trace: Trace, device: int, number: int) -> str:
    """Return what a stream of a trace is called in evidence."""
    handles = {use.handle for use in trace.seen.streams if (use.device, use.number) == (device, number)}
    is_default = handles == {0} if handles else number == _DEFAULT
    return "the default stream" if is_default else f"stream {number}"


def by_number(trace: Trace, evidence: str) -> str:
    """Return evidence that watching wrote, in which streams are named by handles, with their numbers in the trace."""
    numbers = {f"{use.handle:#x}": use.number for use in trace.seen.streams if use.number is not None}
    return _HANDLE.sub(lambda found: f"stream {numbers.get(found[1], found[1])}", evidence)
