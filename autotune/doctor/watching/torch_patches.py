"""Methods of torch's streams, events and graphs that also tell what they are called for, while requests are watched.

Launches through cuda.bindings, as auxhead's own runners make, and through Triton are told too.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from ....kernels.cuda_runtime import runtime
from ....kernels.driver_launch import driver, triton_knobs
from .user_lines import calling_line

#: Functions of cuda.bindings that put work on a stream.
_LAUNCHES = (
    *((runtime, name) for name in ("cudaGraphLaunch", "cudaLaunchHostFunc", "cudaMemcpyAsync", "cudaMemsetAsync")),
    *((driver, name) for name in ("cuGraphLaunch", "cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel")),
)


class Told(Protocol):
    """What is told; lines are the user's, None where torch or auxhead itself calls."""

    def block_entered(self, context: object, stream: Any, line: str | None) -> None:
        """A ``with`` block of a stream begins."""

    def block_left(self, context: object) -> None:
        """It ends."""

    def stream_made(self, stream: torch.cuda.Stream, device: object, line: str | None) -> None:
        """``torch.cuda.Stream(device)`` has made a stream."""

    def event_awaited(self, event: torch.cuda.Event, line: str | None) -> None:
        """A stream or the host is about to wait for an event."""

    def found_done(self, which: Any) -> None:
        """A query of a stream or an event has said that it is done."""

    def host_waited(self) -> None:
        """The host waits for the device within an operator."""

    def backward_begins(self) -> None:
        """``backward`` or ``torch.autograd.grad`` is called."""

    def backward_ended(self) -> None:
        """It has returned, or raised."""

    def graph_replayed(self, graph: torch.cuda.CUDAGraph) -> None:
        """A graph is about to be replayed on the current stream."""

    def launched_elsewhere(self) -> None:
        """A launch is made through cuda.bindings."""

    def launched_triton(self) -> None:
        """Triton launches a kernel."""


@contextmanager
def patched_torch(told: Told) -> Iterator[None]:
    """Let torch's methods tell; at the end they are what they were."""
    with ExitStack() as stack:
        _hear_of_waits(stack, told)
        for kind in (torch.cuda.StreamContext, torch.cuda.Stream):
            of = _of_context if kind is torch.cuda.StreamContext else _itself
            replace(stack, kind, "__enter__", functools.partial(_entering, told, of))
            replace(stack, kind, "__exit__", functools.partial(_leaving, told, of))
        replace(stack, torch.cuda.Stream, "__new__", functools.partial(_making, told))
        for name in ("wait", "synchronize"):
            replace(stack, torch.cuda.Event, name, functools.partial(_awaiting, told))
        for queried in (torch.cuda.Event, torch.cuda.Stream):
            replace(stack, queried, "query", functools.partial(_querying, told))
        for name in ("backward", "grad"):
            replace(stack, torch.autograd, name, functools.partial(_going_back, told))
        replace(stack, torch.cuda.CUDAGraph, "replay", functools.partial(_replaying, told))
        for module, name in _LAUNCHES:
            if hasattr(module, name):
                replace(stack, module, name, functools.partial(_launching, told))
        if triton_knobs is not None:

            def launching(*_: object, **__: object) -> None:
                told.launched_triton()

            triton_knobs.launch_enter_hook.add(launching)
            stack.callback(triton_knobs.launch_enter_hook.remove, launching)
        yield


def _hear_of_waits(stack: ExitStack, told: Told) -> None:
    """Have PyTorch warn of operators in which the host waits, and tell of them instead; other warnings are as before.

    See https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
    """
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("always", UserWarning)
    show = warnings.showwarning

    def hear(message: Any, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            told.host_waited()
        elif "Synchronization debug mode" not in str(message):
            show(message, *args, **kwargs)

    warnings.showwarning = hear
    stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
    torch.cuda.set_sync_debug_mode("warn")


def replace(stack: ExitStack, owner: Any, name: str, replacing: Callable[[Callable[..., Any]], Any]) -> None:
    """Put what ``replacing`` makes of an attribute in its place until the stack closes."""
    own = vars(owner).get(name)  # None: inherited; the method of a class itself, and not a function bound to it
    if own is None:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, own)
    replaced = functools.wraps(getattr(owner, name))(replacing(getattr(owner, name)))
    setattr(owner, name, staticmethod(replaced) if name == "__new__" else replaced)


def _of_context(context: Any) -> Any:
    return context.stream


def _itself(stream: Any) -> Any:
    return stream


def _entering(told: Told, of: Callable[[Any], Any], original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def enter(context: Any) -> Any:
        entered = original(context)
        if of(context) is not None:
            told.block_entered(context, of(context), calling_line(sys._getframe(1)))
        return entered

    return enter


def _leaving(told: Told, of: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def leave(context: Any, *raised: Any) -> Any:
        if of(context) is not None:
            told.block_left(context)
        return original(context, *raised)

    return leave


def _making(told: Told, original: Callable[..., Any]) -> Callable[..., Any]:
    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        stream = original(cls, *args, **kwargs)
        if not {"stream_id", "stream_ptr"} & kwargs.keys():  # these name one that is there
            device = args[0] if args else kwargs.get("device")
            told.stream_made(stream, device, calling_line(sys._getframe(1)))
        return stream

    return make


def _awaiting(told: Told, original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(event: Any, *args: Any, **kwargs: Any) -> Any:
        told.event_awaited(event, calling_line(sys._getframe(1)))
        return original(event, *args, **kwargs)

    return wait


def _querying(told: Told, original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def query(queried: Any) -> bool:
        is_done = original(queried)
        if is_done:
            told.found_done(queried)
        return is_done

    return query


def _going_back(told: Told, original: Callable[..., Any]) -> Callable[..., Any]:
    def go_back(*args: Any, **kwargs: Any) -> Any:
        told.backward_begins()
        try:
            return original(*args, **kwargs)
        finally:
            told.backward_ended()

    return go_back


def _replaying(told: Told, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def replay(graph: Any) -> Any:
        told.graph_replayed(graph)
        return original(graph)

    return replay


def _launching(told: Told, original: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*args: Any, **kwargs: Any) -> Any:
        told.launched_elsewhere()
        return original(*args, **kwargs)

    return launch
