"""Replaced functions of PyTorch and Python, while requests are watched: in their place, and put back at the end."""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch


def replace(stack: ExitStack, holder: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Have calls of an attribute call ``replacement`` until the stack closes, with the original and their arguments."""
    own = vars(holder).get(name)  # None: inherited; the method of a class itself, and not a function bound to it
    if own is None:
        stack.callback(delattr, holder, name)
    else:
        stack.callback(setattr, holder, name, own)
    original = getattr(holder, name)

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(holder, name, staticmethod(replaced) if name == "__new__" else replaced)


@contextmanager
def waits_heard(host_waited: Callable[[], None]) -> Iterator[None]:
    """Have PyTorch warn of operators in which the host waits, and tell of them instead; other warnings are as before.

    See https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()

        def hear(message: Any, *args: Any, **kwargs: Any) -> None:
            if "called a synchronizing CUDA operation" in str(message):
                host_waited()
            elif "Synchronization debug mode" not in str(message):
                show(message, *args, **kwargs)

        warnings.showwarning = hear
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def within_threads(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Let threads that begin meanwhile, and what is submitted to pools, run within a new context each.

    The workers of a pool outlive what they are given, so that it is that which runs within one, and not the worker.
    """

    def within(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    def submit(original: Callable[..., Future[Any]], pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
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
