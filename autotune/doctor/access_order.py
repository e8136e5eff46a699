"""Orders accesses to GPU memory from several streams: PyTorch's CUDA Stream Sanitizer, asked instead of raising errors.

The sanitizer (``torch.cuda._sanitizer``) keeps for each stream which work of the others it has been made to wait for.
It forgets a tensor once it is freed; here its memory is remembered until something else is written there.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.cuda._sanitizer import FACTORY_FUNCTION_REGEX, Access, ArgumentHandler, EventHandler
from torch.utils._pytree import tree_leaves

from .sources import is_users
from .watched import Race


class _Use(NamedTuple):
    """The last use of a piece of memory on a stream."""

    number: int
    """Of the operator, in the sanitizer's count."""
    said: str
    line: str | None


class _Freed(NamedTuple):
    """Memory that was freed, and its uses on streams."""

    begin: int
    end: int
    uses: dict[int, _Use]
    line: str | None


class AccessOrder:
    """Told of operators, events and memory in the order in which the host comes to them, finds what nothing orders."""

    def __init__(self) -> None:
        self.handler = EventHandler()
        self.races: dict[tuple[Any, ...], Race] = {}
        self.names = {0: "the default stream"}
        self._uses: dict[int, dict[int, _Use]] = {}
        self._sizes: dict[int, int] = {}
        self._allocated: set[int] = set()
        self._freed: list[_Freed] = []

    def operator(self, func: Any, arguments: Sequence[Any], keywords: dict[str, Any], output: Any, stream: int) -> None:
        """Note an operator that was launched on a stream."""
        schema, accesses = func._schema, ArgumentHandler()
        is_factory = bool(FACTORY_FUNCTION_REGEX.match(schema.name))
        accesses.parse_inputs(schema, tuple(arguments), keywords, is_factory=is_factory)
        accesses.parse_outputs(schema, output, is_factory=is_factory)
        written = accesses.dataptrs_written
        errors = self.handler._handle_kernel_launch(
            stream, accesses.dataptrs_read - written, written, accesses.outputs, schema, accesses.tensor_aliases
        )
        for one in errors:
            self._note_race(one.previous_access, one.current_access, arguments)
        if accesses.dataptrs_read or written:
            self._note_uses(schema.name, (arguments, keywords, output), stream)

    def record_stream(self, tensor: Tensor, stream: int) -> None:
        """Note that the allocator was told of a stream: it does not reuse the memory before that is done with it."""
        self._uses.get(tensor.untyped_storage().data_ptr(), {}).pop(stream, None)

    def allocate(self, pointer: int) -> None:
        """Note that memory is given out."""
        self.handler._handle_memory_allocation(pointer)
        self._allocated.add(pointer)

    def free(self, pointer: int) -> None:
        """Note that memory is given back."""
        self.handler._handle_memory_deallocation(pointer)
        uses = self._uses.pop(pointer, None)
        if uses:
            self._freed.append(_Freed(pointer, pointer + self._sizes[pointer], uses, own_line()))

    def _note_uses(self, operator: str, values: Any, stream: int) -> None:
        use = _Use(self.handler.seq_num, f"{operator} on {self.name_of(stream)}", own_line())
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or not tensor.is_cuda:
                continue
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if pointer in self._allocated:
                self._allocated.discard(pointer)
                self._check_reuse(pointer, pointer + size, use, stream, tensor)
            self._uses.setdefault(pointer, {})[stream] = use
            self._sizes[pointer] = size

    def _check_reuse(self, begin: int, end: int, use: _Use, stream: int, tensor: Tensor) -> None:
        """Find uses of what lay here before which the stream that writes now has not been made to wait for."""
        for one in [each for each in self._freed if each.begin < end and begin < each.end]:
            for other, before in one.uses.items():
                if other == stream or self.handler.syncs.is_ordered_after(stream, before.number, other):
                    continue
                lines = tuple(dict.fromkeys(line for line in (before.line, one.line, use.line) if line is not None))
                race = Race(
                    f"memory that is now a tensor of {_shape(tensor)}", f"used by {before.said}, then freed",
                    f"written by {use.said}", lines, freed=True,
                )  # fmt: skip
                self.races.setdefault(("freed", lines or race.second), race)
            if begin <= one.begin and one.end <= end:
                self._freed.remove(one)

    def _note_race(self, first: Access, second: Access, arguments: Sequence[Any]) -> None:
        said = [self._in_words(one) for one in (first, second)]
        lines = tuple(line for line in map(_line_of, (first, second)) if line is not None)
        shapes = [_shape(one) for one in tree_leaves(arguments) if isinstance(one, Tensor) and _is_at(one, second)]
        names = ", ".join(dict.fromkeys([*first.aliases, *second.aliases])) or "a tensor"
        race = Race(shapes[0] if shapes else names, said[0], said[1], tuple(dict.fromkeys(lines)))
        self.races.setdefault(lines or tuple(said), race)

    def _in_words(self, access: Access) -> str:
        what = {"READ": "reads", "WRITE": "writes"}[access.type.name]
        return f"{str(access.operator).partition('(')[0]} {what} it on {self.name_of(access.stream)}"

    def name_of(self, stream: int) -> str:
        """Return a stream in words."""
        return self.names.get(stream, f"stream {stream:#x}")


def _is_at(tensor: Tensor, access: Access) -> bool:
    return tensor.is_cuda and bool(access.aliases)


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _line_of(access: Access) -> str | None:
    for frame in reversed(access.stack_trace):
        if is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def own_line() -> str | None:
    """Return the innermost line of the user's own code that is running, ``file.py:12``; None if there is none."""
    for file, line in _frames():
        if is_users(file):
            return f"{file}:{line}"
    return None


def _frames() -> Iterator[tuple[str, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
