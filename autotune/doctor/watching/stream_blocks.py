"""``with`` blocks of streams while requests are watched: those that nothing runs in, and what runs beside them."""

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from ..watched import Noticed
from .stream_uses import StreamKey, StreamUses


@dataclass
class _Block:
    """A block that is open."""

    context: object
    stream: StreamKey
    line: str | None
    """Where the user's code enters it; None: torch or auxhead does."""
    is_empty: bool = True


@dataclass
class _Backward:
    """A backward that runs in a block of the user's."""

    block: _Block
    operators: Counter[StreamKey] = field(default_factory=Counter)


class Elsewhere(NamedTuple):
    """The innermost block of an operator that does not run on its stream, for it is on another device."""

    stream: StreamKey
    line: str
    is_nested: bool
    """A block further out is of the operator's device. That is a fault only if nothing at all runs on the device of the
    inner one: blocks of both devices, most of all of one line, are there for both."""


class StreamBlocks:
    """The blocks of each thread: a stream is the current one of the thread that enters its block, and of no other.

    A block in which nothing ran is told only where the user's own code entered it, and where all operators of its
    device, before and after, ran on one other stream and nothing else was launched. A launch that cannot be seen, as
    another library's, can so only be taken for none if it is all that the program does beside one stream; a trace
    tells then that kernels ran on two.
    """

    def __init__(self, uses: StreamUses) -> None:
        """Have no block open."""
        self._uses = uses
        self._open_in: dict[int, list[_Block]] = defaultdict(list)  # by thread
        self._empty: dict[str, StreamKey] = {}  # the line of a block that was left -> its stream
        self._ran: set[str] = set()  # lines of blocks that something ran in, another time
        self._at_home: set[str] = set()  # lines of blocks in which something ran on the block's own device
        self._suspects: dict[str, Noticed] = {}  # by the line of the block
        self._backwards: list[_Backward] = []  # that run
        self._strayed: dict[str, Noticed] = {}  # by the line of the block

    @property
    def _open(self) -> list[_Block]:
        return self._open_in[threading.get_ident()]

    def entered(self, context: object, stream: StreamKey, line: str | None) -> None:
        """Note that a block begins; ``line``: of the user's own code, if it enters it itself."""
        self._open.append(_Block(context, stream, line))

    def left(self, context: object) -> None:
        """Note that a block ends."""
        opened = self._open
        for index in reversed(range(len(opened))):
            if opened[index].context is context:
                block = opened.pop(index)
                if block.line is not None:
                    if block.is_empty:
                        self._empty[block.line] = block.stream
                    else:
                        self._ran.add(block.line)
                return

    def ran(self, devices: set[int] | None = None) -> None:
        """Note that something runs on those devices, in all blocks that are open; None: where is not known."""
        for block in self._open:
            block.is_empty = False
            if block.line is not None and (devices is None or block.stream.device in devices):
                self._at_home.add(block.line)

    def elsewhere(self, devices: set[int], current_device: int) -> Elsewhere | None:
        """Return the innermost block if an operator on those devices does not run on its stream.

        None as well where the code has chosen the operator's device itself.
        """
        opened = self._open
        if not opened:
            return None
        block = opened[-1]
        if block.line is None or current_device != block.stream.device or block.stream.device in devices:
            return None
        is_nested = any(one.stream.device in devices for one in opened)
        return Elsewhere(block.stream, block.line, is_nested)

    def backward_begins(self) -> None:
        """Note that this thread calls a backward, which other threads may run."""
        opened = self._open
        if opened and opened[-1].line is not None:
            self._backwards.append(_Backward(opened[-1]))

    def backward_ran(self, key: StreamKey) -> None:
        """Note an operator of a backward; of two that run at once nobody knows whose it is."""
        if len(self._backwards) == 1:
            self._backwards[0].operators[key] += 1

    def backward_ended(self) -> None:
        """Note its end; autograd runs each operator on the stream of its forward, whatever the block."""
        opened = self._open
        ended = next((one for one in reversed(self._backwards) if opened and one.block is opened[-1]), None)
        if ended is None:
            return
        self._backwards.remove(ended)
        block, operators, line = ended.block, ended.operators, ended.block.line
        if line is None or not operators or block.stream in operators:
            return
        stream, count = operators.most_common(1)[0]
        if stream.device == block.stream.device:
            evidence = (
                f"the backward in the block of {self._uses.words(block.stream.handle)}, {line}, runs {count} operators "
                f"on {self._uses.words(stream.handle)}, and none on its own"
            )
            self._strayed.setdefault(line, Noticed("default-stream", evidence, (line,), of_backward=True))

    def suspected(self, line: str, noticed: Noticed) -> None:
        """Keep what is a fault if nothing ever runs on its own device in the block of that line."""
        self._suspects.setdefault(line, noticed)

    def noticed(self) -> tuple[Noticed, ...]:
        """Return what was suspected and is so, and blocks in which nothing ever ran, of the kind "default-stream"."""
        strayed = tuple(self._strayed.values())
        if self._uses.is_partial:
            return strayed
        found = [noticed for line, noticed in self._suspects.items() if line not in self._at_home]
        for line, stream in self._empty.items():
            running = self._uses.running_on(stream.device)
            if line not in self._ran and len(running) == 1 and running[0] != stream:
                evidence = (
                    f"nothing runs in the block of {self._uses.words(stream.handle)}, {line}: all "
                    f"{self._uses.total()} operators run on {self._uses.words(running[0].handle)}"
                )
                found.append(Noticed("default-stream", evidence, (line,)))
        return (*strayed, *found)
