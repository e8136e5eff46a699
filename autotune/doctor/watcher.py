"""Watches requests as they run: streams, events, memory and contexts, for what no trace of the profiler tells.

Operators are seen by a dispatch mode, which sees none of autograd's own threads, none within a CUDA graph that is
replayed, and no kernel that is launched without PyTorch.
"""

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .access_order import AccessOrder, own_line
from .watched import Noticed, StreamUse, Watched

#: Who is told of events and memory: callbacks of PyTorch are for ever, watchers are not.
_told: list[AccessOrder] = []


@cache
def _tell_of_events() -> None:
    """Let PyTorch tell of each event, allocation and wait, from now on."""
    torch._C._activate_gpu_trace()

    def tell(to: Callable[[AccessOrder], Callable[..., None]]) -> Callable[..., None]:
        return lambda *told: to(_told[-1])(*told) if _told else None

    gpu_trace.register_callback_for_event_creation(tell(lambda one: one.handler._handle_event_creation))
    gpu_trace.register_callback_for_event_deletion(tell(lambda one: one.handler._handle_event_deletion))
    gpu_trace.register_callback_for_event_record(tell(lambda one: one.handler._handle_event_record))
    gpu_trace.register_callback_for_event_wait(tell(lambda one: one.handler._handle_event_wait))
    gpu_trace.register_callback_for_memory_allocation(tell(lambda one: one.allocate))
    gpu_trace.register_callback_for_memory_deallocation(tell(lambda one: one.free))
    gpu_trace.register_callback_for_stream_creation(tell(lambda one: one.handler._handle_stream_creation))
    gpu_trace.register_callback_for_device_synchronization(tell(lambda one: one.handler._handle_device_synchronization))
    gpu_trace.register_callback_for_stream_synchronization(tell(lambda one: one.handler._handle_stream_synchronization))
    gpu_trace.register_callback_for_event_synchronization(tell(lambda one: one.handler._handle_event_synchronization))


@dataclass
class _Context:
    """A ``with torch.cuda.stream(s)`` that is open."""

    stream: Any
    line: str | None
    devices: Counter[int] = field(default_factory=Counter)
    """GPUs of the operators in it."""
    replays: int = 0


class Watcher(TorchDispatchMode):
    """A context in which all is watched that the thread does; without a GPU it sees nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._order = AccessOrder()
        self._operators: Counter[tuple[int, int]] = Counter()
        self._streams: dict[tuple[int, int], Any] = {}
        self._contexts: list[_Context] = []
        self._empty: dict[str, Noticed] = {}
        self._noticed: dict[Noticed, None] = {}
        self._replays = 0
        self._patches = ExitStack()

    def __enter__(self) -> "Watcher":
        if torch.cuda.is_available():
            _tell_of_events()
            self._hear_of_waits()
        _told.append(self._order)
        self._patch(torch.cuda.StreamContext, "__enter__", self._entered)
        self._patch(torch.cuda.StreamContext, "__exit__", self._left)
        self._patch(torch.cuda.Event, "wait", self._waits)
        self._patch(torch.cuda.Event, "synchronize", self._waits)
        self._patch(torch.cuda.CUDAGraph, "replay", self._replayed)
        made = torch.cuda.Stream.__new__

        def make(cls: type, device: Any = None, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(device, torch.Stream):
                self._notice("stream-class", f"torch.cuda.Stream({self._order.name_of(device.cuda_stream)})")
            return made(cls, device, *arguments, **keywords)

        torch.cuda.Stream.__new__ = make  # type: ignore[method-assign]
        self._patches.callback(setattr, torch.cuda.Stream, "__new__", made)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._patches.close()
            _told.remove(self._order)

    def _hear_of_waits(self) -> None:
        """Let PyTorch warn of each operator in which the host waits, and note the line instead of the warning."""
        shown = warnings.showwarning

        def show(message: Any, *arguments: Any, **keywords: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self._notice("host-wait", "the host waits here")
            elif "Synchronization debug mode" not in str(message):
                shown(message, *arguments, **keywords)

        self._patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        self._patches.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")

    def _patch(self, kind: type, name: str, note: Callable[..., None]) -> None:
        before = getattr(kind, name)

        def noted(instance: Any, *arguments: Any, **keywords: Any) -> Any:
            note(instance)
            return before(instance, *arguments, **keywords)

        own = name in vars(kind)
        setattr(kind, name, noted)
        self._patches.callback(lambda: setattr(kind, name, before) if own else delattr(kind, name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.record_stream.default:
            stream = args[1]
            known = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
            self._order.record_stream(args[0], known.cuda_stream)
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        tensors = [one for one in tree_leaves((args, kwargs, output)) if isinstance(one, Tensor) and one.is_cuda]
        if tensors:
            device = tensors[0].device
            stream = torch.cuda.current_stream(device)
            key = device.index, stream.cuda_stream
            self._streams.setdefault(key, stream)
            self._operators[key] += 1
            if stream.cuda_stream:
                self._order.names.setdefault(
                    stream.cuda_stream, f"stream {stream.cuda_stream:#x} (priority {stream.priority})"
                )
            for context in self._contexts:
                context.devices[device.index] += 1
            self._order.operator(func, args, kwargs, output, stream.cuda_stream)
        return output

    def _notice(self, kind: str, evidence: str) -> None:
        line = own_line()
        self._noticed[Noticed(kind, evidence, () if line is None else (line,))] = None

    def _waits(self, event: Any) -> None:
        if not event.cuda_event:
            self._notice("unrecorded-event", "an event is waited for, and has never been recorded")

    def _replayed(self, graph: Any) -> None:
        self._replays += 1
        for context in self._contexts:
            context.replays += 1

    def _entered(self, context: Any) -> None:
        self._contexts.append(_Context(context.stream, own_line()))

    def _left(self, context: Any) -> None:
        if not self._contexts:
            return
        one = self._contexts.pop()
        if one.stream is None or one.line is None or one.replays:
            return
        own = one.stream.device.index
        if not one.devices:
            said = "nothing was launched within the context of a stream"
            self._empty[one.line] = Noticed("default-stream", said, (one.line,))
        elif own not in one.devices:
            others = ", ".join(f"cuda:{index}" for index in sorted(one.devices))
            said = f"{one.devices.total()} operators on {others} within the context of a stream of cuda:{own}"
            self._noticed[Noticed("mixed-devices", said, (one.line,))] = None

    def watched(self, requests: int) -> Watched:
        """Return what was watched so far, in so many requests."""
        used = [
            StreamUse(handle, device, self._streams[device, handle].priority, operators)
            for (device, handle), operators in self._operators.items()
        ]
        one_stream = len(used) == 1 and not self._replays
        return Watched(
            requests,
            streams=(*used, *(self._unused() if one_stream else ())),
            races=tuple(self._order.races.values()),
            noticed=(*self._noticed, *(self._empty.values() if one_stream else ())),
        )

    def _unused(self) -> list[StreamUse]:
        """Return streams that somebody holds and on which nothing ran."""
        held = {}
        pytorchs = torch.cuda.graph.default_capture_stream  # made by the first capture, and kept
        for one in gc.get_objects():
            # a type, not isinstance, which asks proxies of all kinds
            if type(one) is torch.cuda.Stream and one.cuda_stream and one is not pytorchs:
                held[one.device.index, one.cuda_stream] = one
        return [
            StreamUse(handle, device, one.priority, 0)
            for (device, handle), one in held.items()
            if (device, handle) not in self._operators
        ]
