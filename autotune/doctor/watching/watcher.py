"""Watcher: watches requests as they run, for what the profiler's trace does not tell: accesses, and misused streams."""

import functools
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _gpu_trace

from ..sources import Owner, innermost_line, owner
from ..watched import Noticed, Watched
from .accesses import Accesses, Operator
from .memory import memory_at
from .operators import OperatorCall, OperatorsMode, is_on_gpu, memory_of_graph
from .stream_uses import MadeStream, StreamBlocks, StreamKey, StreamUses, key_of
from .torch_patches import patched_torch, within_threads


class Watcher:
    """Watches what runs within its ``with`` block; without CUDA it sees nothing.

    A warm-up is to come before: what was allocated or recorded then is not known, and gives no finding. Operators of
    autograd's threads are counted, but not checked, for autograd orders its streams itself. Of other threads it sees
    those that begin while it is open, and what pools are given: not what threads do that were there before and wait for
    work of their own. Of graphs it knows the memory if noting_captures was open when they were captured. What Triton
    kernels and other libraries do to memory is not seen. Once a Watcher was open torch calls Python for each allocation
    and event as long as the process is there, which takes the host microseconds: times are to be taken before.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        self._stack = ExitStack()
        self._watch: _Watch | None = None

    def __enter__(self) -> "Watcher":
        """Begin to watch.

        Raises:
            RuntimeError: another one is open.
        """
        if torch.cuda.is_available():
            self._watch = self._stack.enter_context(_watching(_caller(sys._getframe(1))))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it; torch is as it was."""
        self._stack.close()

    def watched(self, requests: int) -> Watched:
        """Return what was seen in so many requests."""
        return Watched(requests) if self._watch is None else self._watch.watched(requests)


class _Watch:
    """All that is noted while one watcher is open."""

    def __init__(self, outermost: FrameType | None) -> None:
        """Look for the user's lines in stacks up to a frame."""
        self.outermost = outermost
        self._lock = threading.RLock()  # autograd's threads allocate; memory may be freed at any time
        self._running: set[int] = set()  # threads that are within an operator
        self._uses = StreamUses()
        self._accesses = Accesses(self._uses)
        self._blocks = StreamBlocks(self._uses)
        self._noticed: dict[tuple[str, tuple[str, ...]], Noticed] = {}

    def watched(self, requests: int) -> Watched:
        """Return all of it."""
        noticed = (*self._noticed.values(), *self._blocks.noticed())
        return Watched(requests, streams=self._uses.summary(), races=self._accesses.races, noticed=noticed)

    # What OperatorsMode tells.

    def operator_begins(self) -> dict[int | None, int]:
        """Note that an operator begins; returns how often the host has waited until now."""
        self._running.add(threading.get_ident())
        return {**self._accesses.host_waits}

    def operator_ended(self, waits: dict[int | None, int], call: OperatorCall | None) -> None:
        """Note what it did."""
        self._running.discard(threading.get_ident())
        if call is None:
            return
        with self._lock:
            accessed = {device: touched for device, touched in call.devices.items() if touched.reads or touched.writes}
            self._blocks.ran(set(accessed))
            if not accessed:
                return
            if is_capturing():
                self._uses.is_partial = True
                return
            streams = {device: current_stream(device) for device in accessed}
            operator = Operator(call.name, self._line())
            if operator.reserves:
                for device, touched in accessed.items():
                    for memory in touched.writes:
                        self._accesses.reserved(streams[device], operator, memory)
                return
            for device, stream in streams.items():
                self._uses.ran(StreamKey(device, stream))
            if torch._C._current_graph_task_id() != -1:  # in a backward
                for device, stream in streams.items():
                    self._blocks.backward_ran(StreamKey(device, stream))
                return
            self._check_devices(operator, set(accessed))
            for device, touched in accessed.items():
                waited = any(self._accesses.host_waits[one] != waits.get(one, 0) for one in (None, streams[device]))
                done = waited and call.ends_with_wait
                self._accesses.launched(streams[device], operator, touched.reads, touched.writes, done)
            if len(streams) > 1:  # a copy: the streams wait for each other before it and after it
                self._accesses.joined(streams.values())

    def stream_recorded(self, tensor: Tensor, stream: Any) -> None:
        """Note Tensor.record_stream."""
        memory = memory_at(tensor) if is_on_gpu(tensor) else None
        if memory is not None:
            with self._lock:
                self._accesses.stream_recorded(memory.block, key_of(stream).handle)

    def _check_devices(self, operator: Operator, devices: set[int]) -> None:
        found = self._blocks.elsewhere(devices, current_device())
        if found is not None:
            where = " and ".join(f"cuda:{device}" for device in sorted(devices))
            evidence = (
                f"{operator.name}, {operator.line or found.line}, runs on the current stream of {where}, in the block "
                f"of {self._uses.words(found.stream.handle)} of cuda:{found.stream.device}, {found.line}"
            )
            if found.is_nested:
                lines = _once_each(operator.line, found.line)
                self._blocks.suspected(found.line, Noticed("mixed-devices", evidence, lines))
            else:
                self._notice("mixed-devices", evidence, operator.line, found.line)

    # What torch's callbacks tell.

    def gpu_trace(self, what: str, *arguments: int) -> None:
        """Note an event of CUDA, by the name of the method of :class:`Accesses`."""
        with self._lock:
            more: tuple[Any, ...] = ()
            if what == "allocated":
                more = (current_stream(current_device()),)
            elif what == "freed":
                more = (self._line(),)
            elif what.endswith("synchronized"):
                more = (self._line() is not None,)
            getattr(self._accesses, what)(*arguments, *more)

    # What torch_patches tells: see Told.

    def block_entered(self, context: object, stream: Any, line: str | None) -> None:
        self._blocks.entered(context, key_of(stream), line)

    def block_left(self, context: object) -> None:
        self._blocks.left(context)

    def stream_made(self, stream: torch.cuda.Stream, device: object, line: str | None) -> None:
        if line is None:
            return
        made = MadeStream(key_of(stream), stream.priority)
        self._uses.made(made)
        if isinstance(device, torch.Stream):
            evidence = f"torch.cuda.Stream of a stream, {line}, makes another one: {self._uses.words(made.key.handle)}"
            self._notice("stream-class", evidence, line)

    def event_awaited(self, event: torch.cuda.Event, line: str | None) -> None:
        if line is not None and not event.cuda_event:
            self._notice("unrecorded-event", f"the event waited for, {line}, was not recorded yet", line)

    def found_done(self, which: Any) -> None:
        if isinstance(which, torch.cuda.Stream):
            self.gpu_trace("stream_synchronized", which.cuda_stream)
        elif which.cuda_event:
            self.gpu_trace("event_synchronized", which.cuda_event)

    def host_waited(self) -> None:
        line = self._line()
        if line is not None:
            self._notice("host-wait", f"the host waits, {line}", line)

    def backward_begins(self) -> None:
        with self._lock:
            self._blocks.backward_begins()

    def backward_ended(self) -> None:
        with self._lock:
            self._blocks.backward_ended()

    def graph_replayed(self, graph: torch.cuda.CUDAGraph) -> None:
        self.launched_elsewhere()
        noted = memory_of_graph(graph)
        if noted is not None and not is_capturing():
            with self._lock:
                stream, operator = current_stream(current_device()), Operator("a graph's replay", self._line())
                self._accesses.launched(stream, operator, noted.reads, noted.writes)

    def launched_elsewhere(self) -> None:
        self._uses.is_partial = True
        self._blocks.ran()

    def launched_triton(self) -> None:
        if threading.get_ident() in self._running:
            return  # part of an operator, which is counted
        with self._lock:
            self._blocks.ran()
            if is_capturing():
                self._uses.is_partial = True
            else:
                device = current_device()
                self._uses.ran(StreamKey(device, current_stream(device)))

    def _line(self) -> str | None:
        return innermost_line(sys._getframe(1), self.outermost)

    def _notice(self, kind: str, evidence: str, *lines: str | None) -> None:
        told = _once_each(*lines)
        self._noticed.setdefault((kind, told), Noticed(kind, evidence, told))


def _once_each(*lines: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for line in lines if line is not None))


#: The one that is open, and whether torch's callbacks were registered.
_state: dict[str, Any] = {"open": None, "registered": False}


@contextmanager
def _watching(outermost: FrameType | None) -> Iterator[_Watch]:
    """Have a watch open, the only one of the process."""
    if _state["open"] is not None:
        raise RuntimeError("Watcher: another one is open in this process, wants to be the only one")
    watch = _Watch(outermost)
    _register()
    logger = logging.getLogger("torch.cuda._sanitizer")  # it tells of all that was there before
    was_disabled, logger.disabled = logger.disabled, True
    _state["open"] = watch
    try:

        def mode() -> OperatorsMode:
            return OperatorsMode(
                watch.operator_begins, watch.operator_ended, watch.stream_recorded, watch.launched_elsewhere
            )

        # Beneath the mode compiled functions run eagerly; of those in one graph PyTorch 2.14 wants to be told.
        with torch.compiler.set_stance("force_eager"), patched_torch(watch), within_threads(mode), mode():
            yield watch
    finally:
        _state["open"] = None
        logger.disabled = was_disabled
        watch.outermost = None


def _register() -> None:
    """Have torch call for events of CUDA, for good: callbacks cannot be taken back, but do nothing if none is open."""
    if _state["registered"]:
        return
    _state["registered"] = True
    torch._C._activate_gpu_trace()
    for registered, what in (
        (_gpu_trace.register_callback_for_event_creation, "event_created"),
        (_gpu_trace.register_callback_for_event_deletion, "event_deleted"),
        (_gpu_trace.register_callback_for_event_record, "event_recorded"),
        (_gpu_trace.register_callback_for_event_wait, "event_waited"),
        (_gpu_trace.register_callback_for_memory_allocation, "allocated"),
        (_gpu_trace.register_callback_for_memory_deallocation, "freed"),
        (_gpu_trace.register_callback_for_stream_creation, "stream_created"),
        (_gpu_trace.register_callback_for_device_synchronization, "device_synchronized"),
        (_gpu_trace.register_callback_for_stream_synchronization, "stream_synchronized"),
        (_gpu_trace.register_callback_for_event_synchronization, "event_synchronized"),
    ):
        registered(functools.partial(_told, what))


def _told(what: str, *arguments: int) -> None:
    watch: _Watch | None = _state["open"]
    if watch is not None:
        watch.gpu_trace(what, *arguments)


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that opens a watcher: an ExitStack may enter it."""
    while frame is not None and owner(frame.f_code.co_filename) is Owner.STANDARD:
        frame = frame.f_back
    return frame


def current_device() -> int:
    """Return the number of the current device of CUDA."""
    device: int = torch._C._cuda_getDevice()
    return device


def current_stream(device: int) -> int:
    """Return the handle of a device's current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a graph, so that nothing runs."""
    capturing: bool = torch._C._cuda_isCurrentStreamCapturing()
    return capturing
