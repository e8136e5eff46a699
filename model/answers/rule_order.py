"""Order of writes and reads of exit rules and folded weights, which may come on different streams of a device."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...kernels.cuda.lifetimes import keep_in_children, new_event
from ...kernels.cuda.runtime import capture_id, is_capturing, may_be_destroyed
from ..basics.streams import OwnedLock, current_handle, has_streams, stream_pair


class _Write(NamedTuple):
    """The last write to a rule's tensors."""

    done: torch.cuda.Event
    seen: dict[int, torch.cuda.Stream]
    """PyTorch's streams, by handle, on which heads have read it; their later work comes after it."""
    read: dict[int, torch.cuda.Event]
    """Events behind the reads on others' streams, by handle; those may be destroyed, and their handles given away."""


_writes: WeakKeyDictionary[nn.Module, _Write] = WeakKeyDictionary()
#: Runners that read a rule, as keys: of these, other than of a set, a list can be had while another thread adds one.
_readers: WeakKeyDictionary[nn.Module, WeakKeyDictionary["Reader", None]] = WeakKeyDictionary()
_count = 0


def count_writes() -> int:
    """Return how many writes to rules there were in this process; a runner looks at its rules when there are more."""
    return _count


class Reader(Protocol):
    """One that reads rules behind this module's back, from a graph."""

    @property
    def last_reads(self) -> tuple[torch.cuda.Event, ...]:
        """The events behind the reads so far."""


def note_reader(rules: Iterable[nn.Module], reader: Reader) -> None:
    """Let writes of some rules wait for what has read them, as long as that lives."""
    for rule in rules:
        _readers.setdefault(rule, WeakKeyDictionary())[reader] = None


def wait_for_writes(rules: Iterable[nn.Module], stream: torch.cuda.Stream) -> None:
    """Let a stream wait until rules that were assigned to on other streams have their values."""
    for rule in rules:
        if (write := _writes.get(rule)) is not None:
            stream.wait_event(write.done)


def wait_for_write(rule: nn.Module, x: Tensor) -> torch.cuda.Event | None:
    """Let the current stream of a tensor's device wait until a rule has its value, unless it has seen it before.

    Returns an event for the caller to record behind its read, on a stream that may be destroyed. Within a caller's
    capture nothing is done: its graph is ordered by whoever replays it.
    """
    write = _writes.get(rule) if has_streams(x) else None
    device = x.device
    if write is None or (handle := current_handle(device)) in write.seen or is_capturing(device):
        return None
    stream = torch.cuda.current_stream(device)
    stream.wait_event(write.done)
    if may_be_destroyed(stream):
        read = write.read.setdefault(handle, new_event())
        stream.wait_event(read)  # of a destroyed stream of the same handle
        return read
    write.seen[handle] = stream
    return None


#: Held by a write, which is of all tensors or of none.
WRITING = OwnedLock()


@contextmanager
def ordered_write(rule: nn.Module, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Order a write to the tensors of a rule, on one device: after all reads asked for before it, before all others.

    Reads are those of runners and of heads. If the tensors go, their memory comes to others only after the write, and
    after passes that :func:`note_pass` was told of. Within a caller's capture nothing is ordered: the write is part
    of that graph, whose order is up to whoever replays it.
    """
    with WRITING:
        device = tensors[0].device
        if not has_streams(tensors[0]) or is_capturing(device):
            yield
            return
        stream = torch.cuda.current_stream(device)
        _wait_for_reads(rule, stream)
        try:
            yield
        finally:
            done = _note_write(rule, stream)
            trunk = stream_pair(device).trunk
            trunk.wait_event(done)
            keep_in_children(rule)
            for tensor in tensors:
                if type(tensor) is Tensor:  # FakeTensors have no memory
                    tensor.record_stream(trunk)


def note_pass(x: Tensor) -> None:
    """Let memory that was written by :func:`ordered_write` come to others only after what the current stream does.

    That is, the work it was given so far, on the device of a tensor.
    """
    if has_streams(x) and not is_capturing(x.device):
        stream_pair(x.device).trunk.wait_stream(torch.cuda.current_stream(x.device))


def _wait_for_reads(rule: nn.Module, stream: torch.cuda.Stream) -> None:
    for reference in _readers.get(rule, WeakKeyDictionary()).keyrefs():
        if (reader := reference()) is not None:
            for read in reader.last_reads:
                stream.wait_event(read)
    if (last := _writes.get(rule)) is not None:
        stream.wait_event(last.done)
        for read in list(last.read.values()):  # of lists, since other threads may add to the dicts
            stream.wait_event(read)
        for handle, other in list(last.seen.items()):
            if capture_id(handle) is None:  # else this stream would become part of another thread's capture
                stream.wait_stream(other)


def _note_write(rule: nn.Module, stream: torch.cuda.Stream) -> torch.cuda.Event:
    global _count
    done = new_event()
    done.record(stream)
    _writes[rule] = _Write(done, {}, {})
    _count += 1
    return done
