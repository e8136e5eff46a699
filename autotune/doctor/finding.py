"""One finding of the doctor: what is wrong, how that is known, what it costs, what to do."""

from dataclasses import dataclass


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


#: What findings are about; those that make answers wrong first.
KINDS = {
    "race": "streams read and write one tensor without order",
    "freed-in-use": "a tensor is freed while another stream uses it",
    "unrecorded-event": "an event is waited for before it is recorded",
    "mixed-devices": "streams of several devices mixed up",
    "default-stream": "work meant for another stream runs on the one that all else runs on",
    "stream-class": "the class torch.cuda.Stream(s) in place of the context torch.cuda.stream(s)",
    "priority": "the side stream is not lower in priority than the trunk",
    "launch-bound": "kernels are shorter than their launches",
    "host-wait": "the host waits for the device within a request",
    "allocation": "memory is taken from the driver within a request",
    "pageable-copy": "copies from or to pageable memory within a request",
    "full-device": "kernels fill all SMs, so that nothing runs beside them",
    "gate-waits": "a head is on the critical path of a gate",
    "fusible-heads": "heads that could be fused",
    "recapture": "a graph is captured or instantiated within a request",
    "cudnn-benchmark": "cuDNN tries its algorithms within a request",
}
