"""``with`` blocks of streams while requests are watched: those that nothing runs in, and what runs beside them."""

from dataclasses import dataclass

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


class StreamBlocks:
    """The blocks of one thread.

    A block in which nothing ran is told only where the user's own code entered it, and where all operators of its
    device, before and after, ran on one other stream and nothing else was launched. A launch that cannot be seen, as
    another library's, can so only be taken for none if it is all that the program does beside one stream; a trace
    tells then that kernels ran on two.
    """

    def __init__(self, uses: StreamUses) -> None:
        """Have no block open."""
        self._uses = uses
        self._open: list[_Block] = []
        self._empty: dict[str, StreamKey] = {}  # the line of a block that was left -> its stream
        self._ran: set[str] = set()  # lines of blocks that something ran in, another time

    def entered(self, context: object, stream: StreamKey, line: str | None) -> None:
        """Note that a block begins; ``line``: of the user's own code, if it enters it itself."""
        self._open.append(_Block(context, stream, line))

    def left(self, context: object) -> None:
        """Note that a block ends."""
        for index in reversed(range(len(self._open))):
            if self._open[index].context is context:
                block = self._open.pop(index)
                if block.line is not None:
                    if block.is_empty:
                        self._empty[block.line] = block.stream
                    else:
                        self._ran.add(block.line)
                return

    def ran(self) -> None:
        """Note that something runs, in all blocks that are open."""
        for block in self._open:
            block.is_empty = False

    def elsewhere(self, devices: set[int], current_device: int) -> tuple[StreamKey, str] | None:
        """Return the stream of the innermost block, and its line, if an operator on those devices does not run on it.

        None as well where the code has chosen the operator's device itself, or has a block of its stream further out.
        """
        if not self._open:
            return None
        block = self._open[-1]
        if block.line is None or current_device != block.stream.device:
            return None
        if any(one.stream.device in devices for one in self._open):
            return None
        return block.stream, block.line

    def noticed(self) -> tuple[Noticed, ...]:
        """Return the blocks in which nothing ever ran, of the kind "default-stream"."""
        if self._uses.is_partial:
            return ()
        found = []
        for line, stream in self._empty.items():
            running = self._uses.running_on(stream.device)
            if line not in self._ran and len(running) == 1 and running[0] != stream:
                evidence = (
                    f"nothing runs in the block of {self._uses.words(stream.handle)}, {line}: all "
                    f"{self._uses.total()} operators run on {self._uses.words(running[0].handle)}"
                )
                found.append(Noticed("default-stream", evidence, (line,)))
        return tuple(found)
