"""Has what other threads run while requests are watched run within a context of each."""

import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from .torch_patches import replace


@contextmanager
def within_threads(context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Let threads that begin meanwhile, and what is submitted to pools, run within a new context each.

    The workers of a pool outlive what they are given, so that it is that which runs within one, and not the worker.
    """

    def within(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    def submitting(original: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        def submit(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return original(pool, within, function, *args, **kwargs)

        return submit

    def starting(original: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def start(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            if getattr(target, "__module__", None) != ThreadPoolExecutor.__module__:
                thread.run = functools.partial(within, thread.run)  # type: ignore[method-assign]
            original(thread)

        return start

    with ExitStack() as stack:
        replace(stack, ThreadPoolExecutor, "submit", submitting)
        replace(stack, threading.Thread, "start", starting)
        yield
