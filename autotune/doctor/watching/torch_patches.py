"""Methods of streams, events, graphs and threads that also tell what they are called for, while requests are watched.

Launches through cuda.bindings, as auxhead's own runners make, and through Triton are told too.
"""

import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from ....kernels.cuda.runtime import runtime
from ....kernels.repeat.noted import driver, triton_knobs
from ..sources import calling_line

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
            replace(stack, kind, "__enter__", functools.partial(_enter, told))
            replace(stack, kind, "__exit__", functools.partial(_leave, told))
        replace(stack, torch.cuda.Stream, "__new__", functools.partial(_make, told))
        for name in ("wait", "synchronize"):
            replace(stack, torch.cuda.Event, name, functools.partial(_await, told))
        for queried in (torch.cuda.Event, torch.cuda.Stream):
            replace(stack, queried, "query", functools.partial(_query, told))
        for name in ("backward", "grad"):
            replace(stack, torch.autograd, name, functools.partial(_go_back, told))
        replace(stack, torch.cuda.CUDAGraph, "replay", functools.partial(_replay, told))
        for module, name in _LAUNCHES:
            if hasattr(module, name):
                replace(stack, module, name, functools.partial(_launch, told))
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


def replace(stack: ExitStack, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Have calls of an attribute call ``replacement`` until the stack closes, with the original and their arguments."""
    own = vars(owner).get(name)  # None: inherited; the method of a class itself, and not a function bound to it
    if own is None:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, own)
    original = getattr(owner, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, staticmethod(replaced) if name == "__new__" else replaced)


def _line() -> str | None:
    """Return the line that calls what was replaced: behind this function, a replacement, and what calls that."""
    return calling_line(sys._getframe(3))


def _stream_of(context: Any) -> Any:
    return context.stream if isinstance(context, torch.cuda.StreamContext) else context


def _enter(told: Told, original: Callable[..., Any], context: Any) -> Any:
    entered = original(context)
    if (stream := _stream_of(context)) is not None:
        told.block_entered(context, stream, _line())
    return entered


def _leave(told: Told, original: Callable[..., Any], context: Any, *raised: Any) -> Any:
    if _stream_of(context) is not None:
        told.block_left(context)
    return original(context, *raised)


def _make(told: Told, original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    stream = original(cls, *args, **kwargs)
    if not {"stream_id", "stream_ptr"} & kwargs.keys():  # these name one that is there
        told.stream_made(stream, args[0] if args else kwargs.get("device"), _line())
    return stream


def _await(told: Told, original: Callable[..., Any], event: Any, *args: Any, **kwargs: Any) -> Any:
    told.event_awaited(event, _line())
    return original(event, *args, **kwargs)


def _query(told: Told, original: Callable[..., bool], queried: Any) -> bool:
    is_done = original(queried)
    if is_done:
        told.found_done(queried)
    return is_done


def _go_back(told: Told, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    told.backward_begins()
    try:
        return original(*args, **kwargs)
    finally:
        told.backward_ended()


def _replay(told: Told, original: Callable[..., Any], graph: Any) -> Any:
    told.graph_replayed(graph)
    return original(graph)


def _launch(told: Told, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    told.launched_elsewhere()
    return original(*args, **kwargs)


@contextmanager
def within_threads(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Let threads that begin meanwhile, and what is submitted to pools, run within a new context each.

    The workers of a pool outlive what they are given, so that it is that which runs within one, and not the worker.
    """

    def within(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    def submit(
        original: Callable[..., Future[Any]], pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any,
        **kwargs: Any,
    ) -> Future[Any]:  # fmt: skip
        return original(pool, within, function, *args, **kwargs)

    def start(original: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)
        if getattr(target, "__module__", None) != ThreadPoolExecutor.__module__:
            thread.run = functools.partial(within, thread.run)  # type: ignore[method-assign]
        original(thread)

    with ExitStack() as stack:
        replace(stack, ThreadPoolExecutor, "submit", submit)
        replace(stack, threading.Thread, "start", start)
        yield
