"""Hooks on layers of others: whether there are any, and ours, which other threads and copies do not call."""

import threading
from collections.abc import Callable
from typing import Any

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module carries hooks of its own, which whatever stands in for it would not call."""
    return any(
        getattr(module, name)
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


class ThreadHook:
    """A forward hook that only the thread that made it calls, and no copy of the layer."""

    def __init__(self, hook: Callable[..., None]) -> None:
        """Take a hook for the current thread."""
        self._hook = hook
        self._thread = threading.get_ident()

    def __call__(self, *args: Any) -> None:
        """Go on in that thread."""
        if threading.get_ident() == self._thread:
            self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of a layer that others make meanwhile, deep or pickled, call nothing."""
        return ThreadHook, (_nothing,)


def _nothing(*_args: Any) -> None:
    pass
