"""``Watched``: what was seen while requests ran live, and no trace of the profiler tells; a key of the trace's file."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The key beside ``traceEvents``.
KEY = "auxheadDoctor"


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
    of_backward: bool = False
    """It is about what autograd runs, on the streams of the forward."""


@dataclass(frozen=True)
class FusibleHead:
    """A head of the module that could be one launch."""

    name: str
    """Path of the module."""
    why_not: str | None = None
    """Why it cannot be as it is, with what to write instead; None: it can."""


@dataclass(frozen=True)
class Watched:
    """All that was watched."""

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

    def as_json(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Watched":
        """Return what :meth:`as_json` gave.

        Raises:
            TypeError: other fields.
            KeyError: fields that are missing.
        """

        def each(kind: type, name: str) -> tuple[Any, ...]:
            return tuple(kind(**_with_tuples(one)) for one in content[name])

        return cls(
            requests=content["requests"],
            host_us=content["host_us"],
            streams=each(StreamUse, "streams"),
            races=each(Race, "races"),
            noticed=each(Noticed, "noticed"),
            heads=each(FusibleHead, "heads"),
            environment=content["environment"],
            samples_us=tuple(content["samples_us"]),
            back_to_back=content["back_to_back"],
        )


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
