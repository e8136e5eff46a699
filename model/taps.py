"""Taps: named layers of an unmodified module whose outputs feed heads."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

#: Called at the moment a tapped layer returns, with the place of the tap and the layer's output.
OnTap = Callable[[int, Tensor], None]


class ForwardLeft(BaseException):
    """Raised inside a tap's hook to leave the forward; not an Exception, lest the model catch it."""


@contextmanager
def listening(backbone: nn.Module, taps: Sequence[str], on_tap: OnTap) -> Iterator[None]:
    """While open, a forward of ``backbone`` in this thread calls ``on_tap`` as each tapped layer returns.

    Everything a runner does, it does in ``on_tap``: fork a head to another stream, leave the forward, or cut the
    capture of a graph. Hooks are there only while a runner listens, so that the backbone stays as its owner made it,
    and two threads may run one backbone.
    """
    thread = threading.get_ident()

    def hook_of(place: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                on_tap(place, output)

        return hook

    handles = [backbone.get_submodule(tap).register_forward_hook(hook_of(i)) for i, tap in enumerate(taps)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
