"""Streams that operators run on while requests are watched, and those that are there and run none."""

import gc
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..watched import StreamUse


class StreamKey(NamedTuple):
    """What tells streams apart: the default stream has the same handle on every device."""

    device: int
    handle: int


@dataclass(frozen=True)
class MadeStream:
    """A stream as the user's code made it."""

    key: StreamKey
    priority: int


class StreamUses:
    """Counts of operators, stream by stream."""

    def __init__(self) -> None:
        """Have nothing run yet."""
        self._operators: dict[StreamKey, int] = defaultdict(int)
        self._priorities: dict[int, int] = {0: 0}
        self._made: dict[StreamKey, MadeStream] = {}
        self.is_partial = False
        """A graph, or something else that is no operator, was launched: on which streams it runs is not known."""

    def ran(self, key: StreamKey) -> None:
        """Count an operator, or a launch of Triton, with a stream as the current one."""
        self._operators[key] += 1
        if key.handle not in self._priorities:
            self._priorities[key.handle] = current_priority(key.device)

    def made(self, stream: MadeStream) -> None:
        """Note a stream that the user's code made."""
        self._made[stream.key] = stream
        self._priorities.setdefault(stream.key.handle, stream.priority)

    def running_on(self, device: int) -> list[StreamKey]:
        """Return the streams of a device that operators ran on."""
        return [key for key in self._operators if key.device == device]

    def total(self) -> int:
        """Return how many operators ran."""
        return sum(self._operators.values())

    def words(self, handle: int) -> str:
        """Return what a stream is called in evidence."""
        if handle == 0:
            return "the default stream"
        priority = self._priorities.get(handle)
        return f"stream {handle:#x}" + ("" if priority is None else f", priority {priority}")

    def summary(self) -> tuple[StreamUse, ...]:
        """Return all streams that were current for an operator.

        If all operators ran on one stream and nothing else was launched, those are added that the user has and that ran
        nothing.
        """
        used = [
            StreamUse(key.handle, key.device, self._priorities[key.handle], operators)
            for key, operators in sorted(self._operators.items())
        ]
        if self.is_partial or len(used) != 1:
            return tuple(used)
        idle = {**{stream.key: stream for stream in _living_streams()}, **self._made}
        used += [
            StreamUse(key.handle, key.device, stream.priority, 0)
            for key, stream in sorted(idle.items())
            if key.handle and key not in self._operators
        ]
        return tuple(used)


def _living_streams() -> list[MadeStream]:
    """Return the streams that are kept by someone, but not those of torch itself.

    auxhead's own are of another class, ``ExternalStream``.
    """
    gc.collect()
    streams = [one for one in gc.get_objects() if type(one) is torch.cuda.Stream]
    own = {id(stream) for stream in _streams_of_torch()}
    return [MadeStream(key_of(stream), stream.priority) for stream in streams if id(stream) not in own]


def _streams_of_torch() -> list[torch.cuda.Stream | None]:
    """Return those that torch keeps for good: of graph captures, its own and those of torch.compile."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # there once torch.compile has made graphs
    devices = range(0 if trees is None else torch.cuda.device_count())
    managers = [trees.get_manager(device, create_if_none_exists=False) for device in devices]  # type: ignore[union-attr]
    of_compile = [manager.stream for manager in managers if manager is not None]
    return [torch.cuda.graph.default_capture_stream, *of_compile]


def current_priority(device: int) -> int:
    """Return the priority of a device's current stream."""
    return torch.cuda.current_stream(device).priority


def key_of(stream: torch.Stream) -> StreamKey:
    """Return what tells a stream of CUDA from others."""
    if not isinstance(stream, torch.cuda.Stream):
        stream = torch.cuda.Stream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
    return StreamKey(stream.device.index, stream.cuda_stream)
