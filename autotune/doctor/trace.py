"""Requests of a trace, with what the host called and what the device ran in each: all that findings are made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..measuring.cuda_calls import HEAD_KERNEL
from .watched import Watched

#: How names of auxhead's own kernels begin that compute heads.
HEAD_KERNELS = (HEAD_KERNEL, "fused_head_kernel")


@dataclass(frozen=True)
class Call:
    """A call of the CUDA API by the host."""

    name: str
    """Without CUPTI's version: cudaLaunchKernel."""
    start_us: float
    """Since the request began."""
    end_us: float
    thread: int
    correlation: int | None
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
    call: Call | None
    """That launched it; None if the trace does not have it."""
    graph: bool = False
    """Launched by a graph."""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    """Of a thread."""
    shared_bytes: int | None = None
    """Of a block."""

    @property
    def us(self) -> float:
        """How long it runs."""
        return self.end_us - self.start_us

    @property
    def is_head(self) -> bool:
        """Of a head: as the doctor annotates it live, or by the name of auxhead's own kernels, in graphs too."""
        return self.name.startswith(HEAD_KERNELS) or (self.call is not None and self.call.head is not None)


@dataclass(frozen=True)
class Wait:
    """A stream that is made to wait for an event, as traces with CUDA's synchronisation events have it."""

    start_us: float
    stream: int
    """That waits."""


@dataclass(frozen=True)
class Request:
    """One request, or one step of training."""

    start_us: float
    """In the trace's own time."""
    end_us: float
    """Since the request began: when the host returned or the device was done, whichever is later."""
    calls: tuple[Call, ...]
    """In order of time."""
    work: tuple[Work, ...]
    """In order of time."""
    waits: tuple[Wait, ...] = ()
    next_us: float | None = None
    """When the device begins with the next request, where that follows at once, as in a loop; None: it does not."""


@dataclass(frozen=True)
class Trace:
    """All of a trace that findings are made from."""

    requests: tuple[Request, ...]
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


class BadTrace(ValueError):
    """A file that is no trace, or one without work on a GPU: says which and how to record one, in one line."""
