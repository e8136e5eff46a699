"""Accesses to memory on streams: finds those that nothing orders, and memory that is freed while it is in use.

torch.cuda._sanitizer keeps the accesses, and what each stream was made to wait for; what is here feeds it and asks it.
It tells tensors by a number, which here each view of a storage has for itself; views that share an element are compared
here.
"""

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch._utils import CallbackRegistry
from torch.cuda import _gpu_trace

from ..trace import Race
from .stream_uses import StreamUses

_SANITIZER = "torch.cuda._sanitizer"
#: Of an event that streams wait for in the accounts alone; events of CUDA are addresses.
_JOINING = -1
#: Tries of NumPy's after which two tensors count as apart: shapes that take more are nobody's slices.
_MOST_WORK = 1_000


class Memory(NamedTuple):
    """A tensor's place."""

    pointer: int
    """Address of its first element."""
    block: int
    """Address of its storage, which is what the caching allocator gave."""
    words: str
    """Its type and shape."""
    item: int = 1
    """Bytes of an element."""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    """In bytes."""

    def overlaps(self, other: "Memory") -> bool:
        """Return whether an element of one lies where an element of the other does; both are of one storage."""
        try:
            return np.shares_memory(self._array(), other._array(), max_work=_MOST_WORK)
        except np.exceptions.TooHardError:
            return False

    def _array(self) -> Any:
        """Return an array there, of which NumPy compares addresses and reads nothing."""
        fields = {"shape": self.shape, "strides": self.strides, "typestr": f"|V{self.item}", "version": 3}
        return np.asarray(SimpleNamespace(__array_interface__={"data": (self.pointer, True), **fields}))


def memory_at(tensor: Tensor) -> Memory | None:
    """Return a tensor's memory; None for those that have none of their own: empty, sparse, of subclasses."""
    try:
        pointer, block = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    if not pointer or not tensor.numel():
        return None
    words = f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"
    item = tensor.element_size()
    return Memory(pointer, block, words, item, tuple(tensor.shape), tuple(item * stride for stride in tensor.stride()))


class Operator(NamedTuple):
    """What accessed memory."""

    name: str
    line: str | None
    """The user's own."""

    @property
    def reserves(self) -> bool:
        """It allocates memory and launches nothing."""
        return self.name.partition("::")[2].startswith(("empty", "new_empty"))


@dataclass
class _Freed:
    """Memory that was freed before the stream it was allocated on waited for others that use it."""

    home: int
    """That stream."""
    accesses: list[tuple[Any, str]]
    """Each with the tensor in words."""
    line: str | None
    lent: bool = False
    """The allocator may have given it out again: something was allocated on that stream since."""


class Accesses:
    """All accesses since it was made; streams are given as CUDA's handles, events and memory as addresses.

    Memory counts as freed in use when an operator runs on the stream of its allocation after something else was
    allocated there, and that stream has still not been made to wait for another one's access from before it was freed.
    A stream that waits first, as a side stream does that joins the caller's at the begin of each request, gives none.
    For this, waits of the host that are not the user's own, as between watched requests, order nothing: without them
    the next request would come at once.
    """

    def __init__(self, uses: StreamUses) -> None:
        """Have nothing accessed yet; ``uses`` has words for streams."""
        sanitizer = sanitizer_module()
        self._uses = uses
        self._handler = sanitizer.EventHandler()
        self._syncs = self._handler.syncs
        self._home_syncs = sanitizer.StreamSynchronizations()
        self._read, self._write, self._access = sanitizer.AccessType.READ, sanitizer.AccessType.WRITE, sanitizer.Access
        self._tensors = self._handler.tensors_accessed
        self._homes: dict[int, int] = {}  # block -> stream it was allocated on
        self._inside: dict[int, dict[Memory, int]] = defaultdict(dict)  # block -> its views, with their numbers
        self._numbers = itertools.count(1)
        self._recorded: dict[int, set[int]] = defaultdict(set)  # block -> streams of record_stream
        self._freed: list[_Freed] = []
        self._races: dict[tuple[str, str, bool], Race] = {}
        self.host_waits: dict[int | None, int] = defaultdict(int)
        """How often the host waited for each stream; None: for the device or an event."""

    @property
    def races(self) -> tuple[Race, ...]:
        """What was found, each pair of lines once."""
        return tuple(self._races.values())

    def ordered(self, how: str, *arguments: int, by_user: bool = True) -> None:
        """Note what torch tells of streams and events, by the name of the sanitizer's method that accounts for it.

        ``by_user``: the user's own code has the host wait.
        """
        if how.startswith(("sync_all", "all_streams")):
            self.host_waits[arguments[0] if how == "all_streams_wait_for_stream" else None] += 1
        for syncs in (self._syncs, self._home_syncs) if by_user else (self._syncs,):
            getattr(syncs, how)(*arguments)

    def joined(self, streams: Iterable[int]) -> None:
        """Note that streams have waited for each other, as for a copy between devices."""
        streams = [*streams]
        for stream in streams:
            self.ordered("record_state", _JOINING, stream)
            for other in streams:
                self.ordered("stream_wait_for_event", other, _JOINING)

    def allocated(self, block: int, stream: int) -> None:
        """Note memory that is allocated while ``stream`` is the current one."""
        self._forget(block)  # a deallocation that was not seen
        self._homes[block] = stream
        for freed in self._freed:
            freed.lent |= freed.home == stream

    def stream_recorded(self, block: int, stream: int) -> None:
        """Note Tensor.record_stream."""
        self._recorded[block].add(stream)

    def freed(self, block: int, line: str | None) -> None:
        """Note that memory is given back to the allocator, in the user's line."""
        home = self._homes.get(block)
        if home is not None:
            exempt = {home} | self._recorded.get(block, set())
            accesses = [
                (access, memory.words)
                for memory, number in self._inside.get(block, {}).items()
                for access in self._last_accesses(number)
                if access.stream not in exempt and not self._is_waited_for(home, access)
            ]
            if accesses:
                self._freed.append(_Freed(home, accesses, line))
        self._forget(block)

    def reserved(self, stream: int, operator: Operator, memory: Memory) -> None:
        """Note memory that an operator leaves as it is: another stream's use is to wait for what ran here before."""
        last = self._syncs.current_sync_states.get(stream, {}).get(stream, 0)
        if last:
            number = self._number(memory)
            self._tensors.ensure_tensor_exists(number)
            self._tensors.set_write(number, self._access(self._write, last, stream, operator, [], True, None))

    def launched(
        self, stream: int, operator: Operator, reads: Iterable[Memory], writes: Iterable[Memory], done: bool = False
    ) -> None:
        """Note what an operator accesses on a stream; ``done``: the host has waited until it was."""
        written = {self._number(memory): memory for memory in writes}
        read = {number: memory for memory in reads if (number := self._number(memory)) not in written}
        if not read and not written:
            return
        memories = {**read, **written}
        if written:
            self._settle(stream)
        for number, memory in memories.items():
            self._compare(stream, operator, memory, number in written)
        errors = self._handler._handle_kernel_launch(
            stream, set(read), set(written), set(), operator, {number: [] for number in memories}
        )
        self._home_syncs.update_seq_num(stream, self._handler.seq_num)
        for error in errors:
            later = error.current_access
            self._add(memories[error.data_ptr].words, error.previous_access, later.operator.line, self._words(later))
        if done:
            self.ordered("all_streams_wait_for_stream", stream)

    def _number(self, memory: Memory) -> int:
        views = self._inside[memory.block]
        if memory not in views:
            views[memory] = next(self._numbers)
        return views[memory]

    def _compare(self, stream: int, operator: Operator, memory: Memory, is_write: bool) -> None:
        """Look for accesses without order to other views that share an element with this one."""
        kind = self._write if is_write else self._read
        later = self._access(kind, self._handler.seq_num + 1, stream, operator, [], False, None)
        for other, number in self._inside[memory.block].items():
            if other == memory:
                continue
            unordered = [
                access
                for access in self._last_accesses(number)
                if (is_write or access.type is self._write)
                and access.stream != stream
                and not self._syncs.is_ordered_after(stream, access.seq_num, access.stream)
            ]
            if unordered and memory.overlaps(other):
                for access in unordered:
                    self._add(other.words, access, operator.line, self._words(later))

    def _settle(self, stream: int) -> None:
        """Decide about memory that was freed on a stream and given out again, now that the stream writes."""
        for freed in [freed for freed in self._freed if freed.lent and freed.home == stream]:
            self._freed.remove(freed)
            for access, words in freed.accesses:
                if not self._is_waited_for(stream, access):
                    end = f"freed, of {self._uses.words(stream)}{_at(freed.line)}"
                    self._add(words, access, freed.line, end, freed=True)

    def _is_waited_for(self, home: int, access: Any) -> bool:
        ordered: bool = self._home_syncs.is_ordered_after(home, access.seq_num, access.stream)
        return ordered

    def _last_accesses(self, number: int) -> Iterator[Any]:
        """Yield the last write and the reads since, which come after all that was before."""
        info = self._tensors.accesses.get(number)
        if info is not None:
            yield from info.reads
            if info.write is not None:
                yield info.write

    def _forget(self, block: int) -> None:
        for number in self._inside.pop(block, {}).values():
            self._tensors.accesses.pop(number, None)
        self._homes.pop(block, None)
        self._recorded.pop(block, None)

    def _words(self, access: Any) -> str:
        does = "allocates" if access.operator.reserves else "writes" if access.type is self._write else "reads"
        return f"{does}: {access.operator.name} on {self._uses.words(access.stream)}{_at(access.operator.line)}"

    def _add(self, tensor: str, first: Any, line: str | None, second: str, freed: bool = False) -> None:
        operator = first.operator
        lines = tuple(dict.fromkeys(one for one in (operator.line, line) if one is not None))
        race = Race(tensor, self._words(first), second, lines, freed)
        self._races.setdefault((operator.line or operator.name, line or second, freed), race)


def sanitizer_module() -> ModuleType:
    """Import torch's sanitizer without the callbacks that it registers for a handler of its own.

    That handler would keep a stack for each allocation as long as the process is there.
    """
    if _SANITIZER in sys.modules:
        return sys.modules[_SANITIZER]
    registries = [value for value in vars(_gpu_trace).values() if isinstance(value, CallbackRegistry)]
    before = [[*registry.callback_list] for registry in registries]
    from torch.cuda import _sanitizer

    for registry, callbacks in zip(registries, before, strict=True):
        registry.callback_list[:] = callbacks
    return _sanitizer


def _at(line: str | None) -> str:
    return f", {line}" if line else ""
