"""``StreamUses``: what runs on each stream while requests are watched, and in its ``with`` blocks, or beside them."""

import gc
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..trace import Noticed, StreamUse


class StreamKey(NamedTuple):
    """What tells streams apart: the default stream has the same handle on every device."""

    device: int
    handle: int


@dataclass(eq=False)
class _WithBlock:
    """A block that is open."""

    context: object
    stream: StreamKey
    line: str | None
    """Where the user's code enters it; None: torch or auxhead does."""
    is_empty: bool = True


class StreamUses:
    """Counts of operators, stream by stream, and the blocks of each thread.

    A stream is the current one of the thread that enters its block, and of no other. A block in which nothing ran is
    told only where the user's own code entered it, and where all operators of its device, before and after, ran on one
    other stream and nothing else was launched. A launch that cannot be seen, as another library's, can so only be taken
    for none if it is all that the program does beside one stream; a trace tells then that kernels ran on two.
    """

    def __init__(self) -> None:
        """Have nothing run yet, and no block open."""
        self._operators: Counter[StreamKey] = Counter()
        self._priorities: dict[int, int] = {0: 0}
        self._made: dict[StreamKey, int] = {}  # by the user's code, with their priorities
        self._open_in: dict[int, list[_WithBlock]] = defaultdict(list)  # by thread
        self._empty: dict[str, StreamKey] = {}  # the line of a block that was left -> its stream
        self._filled: set[str] = set()  # lines of blocks that something ran in, another time
        self._at_home: set[str] = set()  # lines of blocks in which something ran on the block's own device
        self._suspects: dict[str, Noticed] = {}  # by the line of the block
        self.is_partial = False
        """A graph, or something else that is no operator, was launched: on which streams it runs is not known."""

    def ran(self, key: StreamKey) -> None:
        """Count an operator, or a launch of Triton, with a stream as the current one."""
        self._operators[key] += 1
        if key.handle not in self._priorities:
            self._priorities[key.handle] = current_priority(key.device)

    def made(self, key: StreamKey, priority: int) -> None:
        """Note a stream that the user's code made."""
        self._made[key] = priority
        self._priorities.setdefault(key.handle, priority)

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
        idle = {**_living_streams(), **self._made}
        used += [
            StreamUse(key.handle, key.device, priority, 0)
            for key, priority in sorted(idle.items())
            if key.handle and key not in self._operators
        ]
        return tuple(used)

    # Blocks.

    @property
    def _open(self) -> list[_WithBlock]:
        return self._open_in[threading.get_ident()]

    def entered(self, context: object, stream: StreamKey, line: str | None) -> None:
        """Note that a block begins; ``line``: of the user's own code, if it enters it itself."""
        self._open.append(_WithBlock(context, stream, line))

    def left(self, context: object) -> None:
        """Note that a block ends."""
        block = next((one for one in reversed(self._open) if one.context is context), None)
        if block is None:
            return
        self._open.remove(block)
        if block.line is not None and block.is_empty:
            self._empty[block.line] = block.stream
        elif block.line is not None:
            self._filled.add(block.line)

    def launched(self, devices: set[int] | None = None) -> None:
        """Note that something runs on those devices, in all blocks that are open; None: where is not known."""
        for block in self._open:
            block.is_empty = False
            if block.line is not None and (devices is None or block.stream.device in devices):
                self._at_home.add(block.line)

    def check_devices(self, operator: str, line: str | None, devices: set[int], current_device: int) -> Noticed | None:
        """Return what is wrong if an operator, in a line, runs on other devices than that of the innermost block.

        Nothing is where the code has chosen the operator's device itself. If a block further out is of that device, it
        is a fault only if nothing at all runs on the device of the inner one, and is kept until that is known: blocks
        of both devices, most of all of one line, are there for both.
        """
        block = self._open[-1] if self._open else None
        if block is None or block.line is None or block.stream.device in devices:
            return None
        if current_device != block.stream.device:
            return None
        where = " and ".join(f"cuda:{device}" for device in sorted(devices))
        evidence = (
            f"{operator}, {line or block.line}, runs on the current stream of {where}, in the block of "
            f"{self.words(block.stream.handle)} of cuda:{block.stream.device}, {block.line}"
        )
        found = Noticed("mixed-devices", evidence, tuple(dict.fromkeys(one for one in (line, block.line) if one)))
        if not any(one.stream.device in devices for one in self._open):
            return found
        self._suspects.setdefault(block.line, found)
        return None

    def noticed(self) -> tuple[Noticed, ...]:
        """Return what was suspected and is so, and blocks in which nothing ever ran, of the kind "default-stream"."""
        if self.is_partial:
            return ()
        found = [noticed for line, noticed in self._suspects.items() if line not in self._at_home]
        for line, stream in self._empty.items():
            running = [key for key in self._operators if key.device == stream.device]
            if line not in self._filled and len(running) == 1 and running[0] != stream:
                evidence = (
                    f"nothing runs in the block of {self.words(stream.handle)}, {line}: all {self._operators.total()} "
                    f"operators run on {self.words(running[0].handle)}"
                )
                found.append(Noticed("default-stream", evidence, (line,)))
        return tuple(found)


def _living_streams() -> dict[StreamKey, int]:
    """Return the streams that are kept by someone, but not those of torch itself, with their priorities.

    auxhead's own are of another class, ``ExternalStream``.
    """
    gc.collect()
    streams = [one for one in gc.get_objects() if type(one) is torch.cuda.Stream]
    own = {id(stream) for stream in _streams_of_torch()}
    return {key_of(stream): stream.priority for stream in streams if id(stream) not in own}


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
