"""``Trace``: requests, what the host called and the device ran in each, and what was watched live."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from ..measuring.cuda_calls import HEAD_KERNEL, PACK_KERNEL

#: The key of a trace's file, beside ``traceEvents``, that holds a :class:`Watched`.
KEY = "auxheadDoctor"

#: A device and the number of a stream on it.
Stream = tuple[int, int]


class BadTrace(ValueError):
    """A file that is no trace, or one without work on a GPU: says which and how to record one, in one line."""


@dataclass(frozen=True)
class StreamUse:
    """A stream on which operators ran, or that was made and ran nothing."""

    handle: int
    """Of CUDA; 0: the default stream of its device."""
    device: int
    priority: int
    """Lower is sooner; 0 is the lowest."""
    operators: int
    """Operators on GPU tensors that ran with it as the current stream, in all watched requests."""
    number: int | None = None
    """Its number in the trace; None where that is not known."""


@dataclass(frozen=True)
class Race:
    """Two accesses to one tensor from two streams, which nothing orders."""

    tensor: str
    """Shape and dtype where they are known, or what the operators call it."""
    first: str
    """``writes``, ``reads`` or ``allocates``, operator, stream and line of the earlier access, in words."""
    second: str
    lines: tuple[str, ...]
    freed: bool = False
    """The second access is its end: the tensor is freed on the stream that it was allocated on."""


@dataclass(frozen=True)
class Noticed:
    """Something else that was noticed, ``kind`` of a finding, with words for its evidence."""

    kind: str
    evidence: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class FusibleHead:
    """A head of the module that could be one launch."""

    name: str
    """Path of the module."""
    why_not: str | None = None
    """Why it cannot be as it is, with what to write instead; None: it can."""


@dataclass(frozen=True)
class Collection:
    """Garbage collected by Python within a request that was timed."""

    request: int
    """Of those that were timed, from 0."""
    generation: int
    us: float
    line: str | None = None
    """The user's line at which it began."""


@dataclass(frozen=True)
class Load:
    """Code that CUDA loaded within a request that was timed."""

    request: int
    """Of those that were timed, from 0."""
    size: int
    """Bytes."""
    line: str | None = None
    """The user's line at which it was loaded."""


@dataclass(frozen=True)
class Watched:
    """What was seen while requests ran live, and no trace of the profiler tells."""

    requests: int
    """How many were watched."""
    host_us: float | None = None
    """Host time of a request without a profiler, from its call until the device has answered; median."""
    streams: tuple[StreamUse, ...] = ()
    races: tuple[Race, ...] = ()
    noticed: tuple[Noticed, ...] = ()
    heads: tuple[FusibleHead, ...] = ()
    """That ran, but for the classifier."""
    environment: Mapping[str, Any] | None = None
    """As records have it."""
    samples_us: tuple[float, ...] = ()
    """Of what ``host_us`` is the median."""
    back_to_back: bool = False
    """One request begins where the one before ends, as in a script; else the device is idle in between."""
    collections: tuple[Collection, ...] = ()
    """In the requests of ``samples_us``."""
    loads: tuple[Load, ...] | None = None
    """In the same requests; None: nothing told of them."""
    without_tf32: tuple[str, ...] = ()
    """Of ``matmul`` and ``convolution`` those that PyTorch was not allowed to compute in TF32."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Watched":
        """Return what ``dataclasses.asdict`` gave; fields that another version has are passed over.

        Raises:
            TypeError: something else.
            KeyError: fields that are missing.
        """

        def read(kind: Any, fields: Mapping[str, Any]) -> Any:
            known = {one.name: fields[one.name] for one in dataclasses.fields(kind) if one.name in fields}
            return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})

        kinds = {"streams": StreamUse, "races": Race, "noticed": Noticed, "heads": FusibleHead}
        lists = {name: tuple(read(kind, one) for one in content[name]) for name, kind in kinds.items()}
        lists["collections"] = tuple(read(Collection, one) for one in content.get("collections", ()))  # since later
        if (loads := content.get("loads")) is not None:
            lists["loads"] = tuple(read(Load, one) for one in loads)
        watched: Watched = dataclasses.replace(read(cls, content), **lists)
        return watched


@dataclass(frozen=True)
class ApiCall:
    """A call of the CUDA API by the host."""

    name: str
    """Without CUPTI's version: cudaLaunchKernel."""
    start_us: float
    """Since the request began."""
    end_us: float
    thread: int
    operator: str | None
    """The innermost operator of PyTorch that it is made in: aten::item."""
    line: str | None
    """The innermost function of the user's own code that it is made in, ``file.py:12 in forward``; None without stacks.

    12 is the line at which that function begins, not the one that calls: a profiler's stacks do not know that one."""
    operator_us: tuple[float, float] | None = None
    """Begin and end of that operator, since the request began."""
    head: str | None = None
    """The head that it is made in, as the doctor annotates heads live."""


@dataclass(frozen=True)
class Work:
    """A kernel, copy or fill on a device."""

    kind: str
    """``kernel``, ``copy`` or ``fill``."""
    name: str
    start_us: float
    """Since the request began."""
    end_us: float
    device: int
    stream: int
    call: ApiCall | None
    """That launched it; None if the trace does not have it."""
    graph: bool = False
    """Launched by a graph."""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None

    @property
    def us(self) -> float:
        """How long it runs."""
        return self.end_us - self.start_us

    @property
    def on(self) -> Stream:
        """Where it runs."""
        return self.device, self.stream

    @property
    def is_head(self) -> bool:
        """Of a head: as the doctor annotates it live, or by the name of auxhead's own kernels, in graphs too."""
        return self.name.startswith((HEAD_KERNEL, PACK_KERNEL)) or (
            self.call is not None and self.call.head is not None
        )


@dataclass(frozen=True)
class Wait:
    """A stream that is made to wait for an event, as traces with CUDA's synchronisation events have it."""

    start_us: float
    stream: int
    """That waits."""


@dataclass(frozen=True, eq=False)
class TracedRequest:
    """One request, or one step of training; findings keep what they tell of it, by its identity."""

    start_us: float
    """In the trace's own time."""
    end_us: float
    """Since the request began: when the host returned or the device was done, whichever is later."""
    calls: tuple[ApiCall, ...]
    """In order of time."""
    work: tuple[Work, ...]
    """In order of time."""
    waits: tuple[Wait, ...] = ()
    next_us: float | None = None
    """When the device begins with the next request, where that follows at once, as in a loop; None: it does not."""

    @property
    def kernels(self) -> list[Work]:
        """What is no copy and no fill."""
        return [work for work in self.work if work.kind == "kernel"]


@dataclass(frozen=True)
class Trace:
    """All of a trace that findings are made from."""

    requests: tuple[TracedRequest, ...]
    """One at least."""
    cut_by: str
    """How requests were told, in words: "the doctor's annotation", "ProfilerStep", "calls of Net"."""
    devices: tuple[Mapping[str, Any], ...]
    """``deviceProperties`` of the trace: numSms, maxThreadsPerMultiprocessor, ..."""
    has_stacks: bool
    watched: Watched | None
    """None: a trace that the doctor did not record."""
    warm: bool = True
    """False: one request alone, before which none may have run, so that it may hold what happens once."""

    @property
    def seen(self) -> Watched:
        """What was watched; nothing, of a trace that the doctor did not record."""
        return self.watched or Watched(requests=0)

    @property
    def shown(self) -> TracedRequest:
        """The request of median length, of which a timeline is drawn and findings have their marks."""
        middle = median_low(request.end_us for request in self.requests)
        return next(request for request in self.requests if request.end_us == middle)

    def median_us(self, amount: Callable[[TracedRequest], float]) -> float:
        """Return the lower median of an amount over the requests: 0 unless more than half of them have any of it."""
        return median_low(amount(request) for request in self.requests)

    def noticed(self, kind: str) -> list[Noticed]:
        """Return what was noticed live of a kind."""
        return [one for one in self.seen.noticed if one.kind == kind]
