"""Simulated streams that know what may run at the same time, and tell of memory that two of them use then.

Work is done at once, on the CPU; what is simulated is its order. Each stream has a clock; a wait takes over another
one's. An access that nothing orders after an earlier one of the same memory, one of the two a write, is a race, and so
is memory that goes back to the allocator while another stream may still use it: the next tensor made on the stream that
it comes from may get it.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict["Stream", int]
_handles = itertools.count(0x1000, 0x10)


class Race(AssertionError):
    """Two streams may use the same memory at the same time."""


class Stream:
    """A stream of CUDA, as far as its order goes."""

    device = torch.device("cpu")
    stream_id = 1

    def __new__(cls, _device: object = None, priority: int = 0, *, handle: int | None = None, index: int | None = None):
        stream = object.__new__(cls)
        stream.cuda_stream = next(_handles) if handle is None else handle
        stream.priority, stream.clock = priority, {}
        if index is not None:
            stream.device = torch.device("cuda", index)
        return stream

    def __init__(self, *_: object, **__: object) -> None:
        """Take what ``__new__`` has taken."""

    def __enter__(self) -> "Stream":
        order.streams.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        order.streams.pop()

    wait_event = torch.cuda.Stream.wait_event  # which calls the event's own method, in a file of torch's

    def wait_stream(self, other: "Stream") -> None:
        other.record_event().wait(self)

    def record_event(self) -> "Event":
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _merge(order.host, self.clock)
        _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(self.cuda_stream)

    def query(self) -> bool:
        return True


class StreamContext:
    """The block of ``torch.cuda.stream(s)``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            order.streams.append(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            order.streams.pop()


#: Makes a stream the current one.
current = StreamContext


class OfPyTorch(Stream):
    """A stream that PyTorch has made, and keeps."""

    gone = False

    @classmethod
    def some(cls) -> list["OfPyTorch"]:
        return [cls(), cls()]


class OfOthers(OfPyTorch):
    """A stream that PyTorch has not made, of a handle that each gets from the one before, which is destroyed then."""

    stream_id = 1 << 12

    def __new__(cls) -> "OfOthers":
        return super().__new__(cls, handle=cls.stream_id)

    @property
    def clock(self) -> dict[Stream, int]:
        assert not self.gone, "a destroyed stream is used"
        return self._clock

    @clock.setter
    def clock(self, clock: dict[Stream, int]) -> None:
        self._clock = clock


class Event:
    """An event of CUDA, of which PyTorch's callbacks are told."""

    cuda_event = 0

    def __init__(self, **_: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or order.current
        self.clock = dict(stream.clock)
        if not self.cuda_event:
            self.cuda_event = next(_handles)
            _gpu_trace.EventCreationCallbacks.fire_callbacks(self.cuda_event)
        _gpu_trace.EventRecordCallbacks.fire_callbacks(self.cuda_event, stream.cuda_stream)

    def synchronize(self) -> None:
        _merge(order.host, self.clock)
        if self.cuda_event:
            _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or order.current
        _merge(stream.clock, self.clock)
        if self.cuda_event:
            _gpu_trace.EventWaitCallbacks.fire_callbacks(self.cuda_event, stream.cuda_stream)

    def query(self) -> bool:
        """Say no as long as the host has not waited for it: the device may be as slow as that."""
        return all(order.host.get(stream, 0) >= time for stream, time in self.clock.items())

    def elapsed_time(self, _end: object) -> float:
        return 1.0


class CUDAGraph:
    """A graph that does nothing; what is captured runs."""

    def capture_begin(self, *_: object, **__: object) -> None:
        pass

    capture_end = capture_begin

    def replay(self) -> str:
        return "replayed"


class _Memory:
    """Accesses of one storage."""

    def __init__(self, made_on: Stream | None) -> None:
        self.made_on = made_on
        self.written: tuple[Stream, int] | None = None
        self.read: Clock = {}
        self.recorded: set[Stream] = set()
        """Streams for which PyTorch's allocator waits once it is given back."""

    def accesses(self) -> Clock:
        found = dict(self.read)
        if self.written is not None:
            found[self.written[0]] = max(self.written[1], found.get(self.written[0], 0))
        return found


class Order:
    """All streams of a simulation, and the memory that work on them uses."""

    def __init__(self) -> None:
        self.checks = True
        """False where work is in PyTorch's own graphs, of which it is not known when they run."""
        self.default = Stream()
        self._here = threading.local()
        self.host: Clock = {}
        self.latest: Clock = {}
        self.published: Clock = {}
        self._memory: dict[int, _Memory] = {}
        self._given_back: dict[Stream, Clock] = {}

    @property
    def streams(self) -> list[Stream]:
        """Those that this thread has entered."""
        return vars(self._here).setdefault("streams", [])

    @property
    def current(self) -> Stream:
        """That of this thread."""
        return self.streams[-1] if self.streams else self.default

    def work(
        self, what: object, reads: Iterable[Tensor], writes: Iterable[Tensor], makes: Iterable[Tensor] = ()
    ) -> None:
        """Do one piece of work on the current stream; raises :class:`Race`."""
        stream = self.current
        _merge(stream.clock, self.host)
        now = stream.clock[stream] = self.latest[stream] = stream.clock.get(stream, 0) + 1
        makes = list(makes)
        if makes and (pending := self._given_back.pop(stream, None)):
            self._demand(stream, pending, f"{what} may get memory that is still in use")
        for tensor in reads:
            memory = self._of(tensor, None)
            if memory.written is not None:
                self._demand(stream, dict([memory.written]), f"{what} reads what is being written")
            memory.read[stream] = now
        for tensor in (*writes, *makes):
            memory = self._of(tensor, stream)
            self._demand(stream, memory.accesses(), f"{what} writes what is in use")
            memory.written, memory.read = (stream, now), {}

    def publish(self) -> None:
        """Let the host see later, without a call of CUDA, that the work on the current stream is done up to here."""
        self.published = dict(self.current.clock)

    def see(self) -> None:
        """Let the host see what was published last."""
        _merge(self.host, self.published)

    def read_by_host(self, tensor: Tensor) -> None:
        """Read a tensor without a call of CUDA; raises :class:`Race`."""
        written = self._of(tensor, None).written
        if self.checks and written is not None and self.host.get(written[0], 0) < written[1]:
            raise Race("the host reads what is being written")

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Do as ``Tensor.record_stream``."""
        self._of(tensor, None).recorded.add(stream)

    def _of(self, tensor: Tensor, made_on: Stream | None) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = _Memory(made_on)
            weakref.finalize(storage, self._give_back, key).atexit = False
        return self._memory[key]

    def _give_back(self, key: int) -> None:
        memory = self._memory.pop(key)
        if memory.made_on is not None:
            waited_for: Clock = {}
            for stream in memory.recorded:
                _merge(waited_for, stream.clock)
            pending = {other: time for other, time in memory.accesses().items() if waited_for.get(other, 0) < time}
            _merge(self._given_back.setdefault(memory.made_on, {}), pending)

    def _demand(self, stream: Stream, accesses: Clock, otherwise: str) -> None:
        if self.checks and any(stream.clock.get(other, 0) < time for other, time in accesses.items()):
            raise Race(otherwise)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if time > clock.get(stream, 0):
            clock[stream] = time


#: That of the simulation under way.
order = Order()


class Watching(TorchDispatchMode):
    """Takes every operator for work on the current stream."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        reads, writes, makes = accesses_of(func, args, kwargs, outputs)
        order.work(func, reads, writes, makes)
        if isinstance(outputs, (bool, int, float)):  # the host has waited for it
            order.current.synchronize()
        return outputs


class _Schema(NamedTuple):
    """What an operator's schema says, which takes long to ask for each time."""

    names: tuple[str, ...]
    written: frozenset[str]
    is_view: bool
    reads_sizes: bool

    @classmethod
    def of(cls, func: Any) -> "_Schema":
        arguments, returns, name = func._schema.arguments, func._schema.returns, func._schema.name
        written = frozenset(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
        is_view = bool(returns) and not written and all(r.alias_info is not None for r in returns)
        return cls(tuple(a.name for a in arguments), written, is_view, name.endswith("_like") or "::new_" in name)


_schema_of = functools.cache(_Schema.of)


def accesses_of(func: Any, args: Any, kwargs: Any, outputs: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the tensors that an operator has read, written and made."""
    schema = _schema_of(func)
    if schema.is_view:
        return [], [], []  # it touches no memory
    given = dict(zip(schema.names, args, strict=False)) | kwargs
    writes = [value for name in schema.written for value in _tensors(given.get(name))]
    reads = [value for name, one in given.items() if name not in schema.written for value in _tensors(one)]
    known = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
    makes = [tensor for tensor in _tensors(outputs) if tensor.untyped_storage()._cdata not in known]
    return [] if schema.reads_sizes else reads, writes, makes


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [] if value.__class__ in _LEAVES else [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


#: What operators take most often that is neither a tensor nor holds any.
_LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}


def patched(patch: Any) -> None:
    """Let torch.cuda hand out simulated streams and events until the test of ``patch`` ends, in an order of its own."""
    global order
    order = Order()
    for name, value in _TORCH_CUDA.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(Tensor, "record_stream", lambda tensor, stream: order.record(tensor, stream))


def _set_stream(stream: Stream) -> None:
    order.streams[-1:] = [stream]


def _synchronize(*_: object) -> None:
    _merge(order.host, order.latest)
    _gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()


_TORCH_CUDA: dict[str, Callable[..., Any]] = {
    "Stream": Stream,
    "StreamContext": StreamContext,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
    "stream": current,
    "set_stream": _set_stream,
    "current_stream": lambda *_: order.current,
    "synchronize": _synchronize,
}
