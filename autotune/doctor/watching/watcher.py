"""Watcher: watches requests as they run, for what the profiler's trace does not tell: accesses, and misused streams."""

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _gpu_trace

from ....kernels.cuda.runtime import driver, runtime
from ....kernels.noted import triton_knobs
from ....model.basics.whose_code import Owner, frames_from
from ..trace import Noticed, Watched
from ..user_code import calling_line, innermost_line
from .accesses import Accesses, Operator, memory_at
from .operators import (
    OperatorCall,
    OperatorObserver,
    OperatorsMode,
    memory_of_graph,
    replace,
    waits_heard,
    within_threads,
)
from .stream_uses import StreamKey, StreamUses, key_of

#: Functions of cuda.bindings that put work on a stream, as auxhead's own runners call them.
_LAUNCHES = (
    *((runtime, name) for name in ("cudaGraphLaunch", "cudaLaunchHostFunc", "cudaMemcpyAsync", "cudaMemsetAsync")),
    *((driver, name) for name in ("cuGraphLaunch", "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel")),
)


class Watcher(OperatorObserver):
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
        self._outermost: FrameType | None = None  # the user's lines are looked for in stacks up to it
        self._lock = threading.RLock()  # autograd's threads allocate; memory may be freed at any time
        self._running: set[int] = set()  # threads that are within an operator
        self._uses = StreamUses()
        self._accesses = Accesses(self._uses)
        self._noticed: dict[tuple[str, tuple[str, ...]], Noticed] = {}

    def __enter__(self) -> "Watcher":
        """Begin to watch.

        Raises:
            RuntimeError: another one is open.
        """
        if torch.cuda.is_available():
            frames = frames_from(sys._getframe(1))  # an ExitStack may enter it
            self._outermost = next((frame for frame, whose in frames if whose is not Owner.STANDARD), None)
            self._stack.enter_context(self._open())
        return self

    def __exit__(self, *raised: object) -> None:
        """End it; torch is as it was."""
        self._stack.close()

    def watched(self, requests: int) -> Watched:
        """Return what was seen in so many requests."""
        noticed = (*self._noticed.values(), *self._uses.noticed())
        return Watched(requests, streams=self._uses.summary(), races=self._accesses.races, noticed=noticed)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Be the only one of the process that is open."""
        if _open:
            raise RuntimeError("Watcher: another one is open in this process, wants to be the only one")
        _register()
        logger = logging.getLogger("torch.cuda._sanitizer")  # it tells of all that was there before
        was_disabled, logger.disabled = logger.disabled, True
        _open.append(self)
        try:
            # Beneath the mode compiled functions run eagerly; of those in one graph PyTorch 2.14 wants to be told.
            with torch.compiler.set_stance("force_eager"), waits_heard(self._host_waited), ExitStack() as stack:
                self._patch(stack)
                stack.enter_context(within_threads(lambda: OperatorsMode(self)))
                stack.enter_context(OperatorsMode(self))
                yield
        finally:
            _open.clear()
            logger.disabled = was_disabled
            self._outermost = None

    def _patch(self, stack: ExitStack) -> None:
        """Have torch's methods tell, until the stack closes."""
        blocks = (torch.cuda.StreamContext, torch.cuda.Stream)
        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            *((kind, "__enter__", self._enter) for kind in blocks),
            *((kind, "__exit__", self._leave) for kind in blocks),
            (torch.cuda.Stream, "__new__", self._make),
            *((torch.cuda.Event, name, self._await) for name in ("wait", "synchronize")),
            (torch.cuda.Event, "query", self._query),
            (torch.cuda.Stream, "query", self._query),
            (torch.cuda.CUDAGraph, "replay", self._replay),
            *((module, name, self._launch) for module, name in _LAUNCHES if hasattr(module, name)),
        ]
        for holder, name, replacement in patches:
            replace(stack, holder, name, replacement)
        if triton_knobs is not None:

            def launching(*_: object, **__: object) -> None:
                self._launched_triton()

            triton_knobs.launch_enter_hook.add(launching)
            stack.callback(triton_knobs.launch_enter_hook.remove, launching)

    # What OperatorsMode tells.

    def operator_begins(self) -> dict[int | None, int]:
        """Note that an operator begins; returns how often the host has waited until now."""
        self._running.add(threading.get_ident())
        return {**self._accesses.host_waits}

    def operator_ended(self, begun: dict[int | None, int], call: OperatorCall | None) -> None:
        """Note what it did."""
        self._running.discard(threading.get_ident())
        if call is None:
            return
        with self._lock:
            accessed = {device: touched for device, touched in call.devices.items() if touched.reads or touched.writes}
            self._uses.launched(set(accessed))
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
                return
            mixed = self._uses.check_devices(operator.name, operator.line, set(accessed), current_device())
            if mixed is not None:
                self._notice(mixed)
            for device, touched in accessed.items():
                waited = any(self._accesses.host_waits[one] != begun.get(one, 0) for one in (None, streams[device]))
                done = waited and call.ends_with_wait
                self._accesses.launched(streams[device], operator, touched.reads, touched.writes, done)
            if len(streams) > 1:  # a copy: the streams wait for each other before it and after it
                self._accesses.joined(streams.values())

    def stream_recorded(self, tensor: Tensor, stream: Any) -> None:
        """Note Tensor.record_stream."""
        if (memory := memory_at(tensor)) is not None:
            with self._lock:
                self._accesses.stream_recorded(memory.block, key_of(stream).handle)

    def launched_elsewhere(self) -> None:
        """Note an operator that calls functions, or a launch through cuda.bindings."""
        self._uses.is_partial = True
        self._uses.launched()

    # What torch's callbacks tell.

    def gpu_trace(self, how: str, *arguments: int) -> None:
        """Note an event of CUDA, by the name of what notes it: of :class:`Accesses`, or of torch's sanitizer."""
        with self._lock:
            if how == "allocated":
                self._accesses.allocated(arguments[0], current_stream(current_device()))
            elif how == "freed":
                self._accesses.freed(arguments[0], self._line())
            else:
                waits = how.startswith(("sync_all", "all_streams"))
                self._accesses.ordered(how, *arguments, by_user=not waits or self._line() is not None)

    def _host_waited(self) -> None:
        line = self._line()
        if line is not None:
            self._notice(Noticed("host-wait", f"the host waits, {line}", (line,)))

    # What stands in the place of torch's methods.

    def _enter(self, original: Callable[..., Any], context: Any) -> Any:
        entered = original(context)
        if (stream := _stream_of(context)) is not None:
            self._uses.entered(context, key_of(stream), _calling_line())
        return entered

    def _leave(self, original: Callable[..., Any], context: Any, *raised: Any) -> Any:
        if _stream_of(context) is not None:
            self._uses.left(context)
        return original(context, *raised)

    def _make(self, original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
        made, line = original(cls, *args, **kwargs), _calling_line()
        if line is not None and not {"stream_id", "stream_ptr"} & kwargs.keys():  # these name one that is there
            key = key_of(made)
            self._uses.made(key, made.priority)
            if isinstance(args[0] if args else kwargs.get("device"), torch.Stream):
                words = self._uses.words(key.handle)
                evidence = f"torch.cuda.Stream of a stream, {line}, makes another one: {words}"
                self._notice(Noticed("stream-class", evidence, (line,)))
        return made

    def _await(self, original: Callable[..., Any], event: Any, *args: Any, **kwargs: Any) -> Any:
        line = _calling_line()
        if line is not None and not event.cuda_event:
            evidence = f"the event waited for, {line}, was not recorded yet"
            self._notice(Noticed("unrecorded-event", evidence, (line,)))
        return original(event, *args, **kwargs)

    def _query(self, original: Callable[..., bool], queried: Any) -> bool:
        is_done = original(queried)
        if is_done and isinstance(queried, torch.cuda.Stream):
            self.gpu_trace("all_streams_wait_for_stream", queried.cuda_stream)
        elif is_done and queried.cuda_event:
            self.gpu_trace("all_streams_wait_for_event", queried.cuda_event)
        return is_done

    def _replay(self, original: Callable[..., Any], graph: Any) -> Any:
        self.launched_elsewhere()
        noted = memory_of_graph(graph)
        if noted is not None and not is_capturing():
            with self._lock:
                stream, operator = current_stream(current_device()), Operator("a graph's replay", self._line())
                self._accesses.launched(stream, operator, noted.reads, noted.writes)
        return original(graph)

    def _launch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.launched_elsewhere()
        return original(*args, **kwargs)

    def _launched_triton(self) -> None:
        if threading.get_ident() in self._running:
            return  # part of an operator, which is counted
        with self._lock:
            self._uses.launched()
            if is_capturing():
                self._uses.is_partial = True
            else:
                device = current_device()
                self._uses.ran(StreamKey(device, current_stream(device)))

    def _line(self) -> str | None:
        return innermost_line(sys._getframe(1), self._outermost)

    def _notice(self, noticed: Noticed) -> None:
        self._noticed.setdefault((noticed.kind, noticed.lines), noticed)


def _stream_of(context: Any) -> Any:
    return context.stream if isinstance(context, torch.cuda.StreamContext) else context


def _calling_line() -> str | None:
    """Return the line that calls what was replaced: behind this function, a replacement, and what calls that."""
    return calling_line(sys._getframe(3))


#: The one that is open.
_open: list[Watcher] = []


@functools.cache
def _register() -> None:
    """Have torch call for events of CUDA, for good: callbacks cannot be taken back, but do nothing if none is open."""
    torch._C._activate_gpu_trace()
    for registered, how in (
        (_gpu_trace.register_callback_for_event_creation, "create_event"),
        (_gpu_trace.register_callback_for_event_deletion, "delete_event"),
        (_gpu_trace.register_callback_for_event_record, "record_state"),
        (_gpu_trace.register_callback_for_memory_allocation, "allocated"),
        (_gpu_trace.register_callback_for_memory_deallocation, "freed"),
        (_gpu_trace.register_callback_for_stream_creation, "create_stream"),
        (_gpu_trace.register_callback_for_device_synchronization, "sync_all_streams"),
        (_gpu_trace.register_callback_for_stream_synchronization, "all_streams_wait_for_stream"),
        (_gpu_trace.register_callback_for_event_synchronization, "all_streams_wait_for_event"),
    ):
        registered(functools.partial(_told, how))
    _gpu_trace.register_callback_for_event_wait(lambda event, stream: _told("stream_wait_for_event", stream, event))


def _told(how: str, *arguments: int) -> None:
    for watcher in _open:
        watcher.gpu_trace(how, *arguments)


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
