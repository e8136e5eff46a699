"""Taps: named layers of an unmodified module whose outputs feed heads."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from .hooks import ThreadHook

#: Called at the moment a tapped layer returns, with the index of the tap and the layer's output.
OnTap = Callable[[int, Tensor], None]


class ForwardLeft(BaseException):
    """Raised inside a tap's hook to leave the forward; not an Exception, lest the model catch it."""


@contextmanager
def listening(backbone: nn.Module, taps: Sequence[str], on_tap: OnTap) -> Iterator[None]:
    """While open, a forward of ``backbone`` in this thread calls ``on_tap`` as each tapped layer returns.

    Everything a runner does, it does in ``on_tap``: fork a head to another stream, leave the forward, or cut the
    capture of a graph. Hooks are there only while a runner listens, so that the backbone stays as its owner made it,
    and two threads may run one backbone. A forward that is not left early must run every tap once and in order, as the
    dry run did, lest an answer be taken for another exit's.
    """
    traced = torch.compiler.is_dynamo_compiling()
    returned = 0

    def hook_of(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            nonlocal returned
            if index != returned:
                expected = f"{taps[returned]!r} should" if returned < len(taps) else "no tap should any more"
                raise RuntimeError(f"heads: layer {taps[index]!r} ran when {expected}, unlike in the dry run")
            returned += 1
            on_tap(index, output)

        return hook

    with ExitStack() as stack:
        for index, tap in enumerate(taps):
            stack.callback(_hook(backbone.get_submodule(tap), hook_of(index), traced=traced))
        yield
        if returned != len(taps):
            raise RuntimeError(f"heads: layer {taps[returned]!r} did not run, unlike in the dry run")


def _hook(layer: nn.Module, hook: Callable[[nn.Module, Any, Any], None], *, traced: bool) -> Callable[[], object]:
    """Register a forward hook, while Dynamo traces or not, and return what removes it."""
    if not traced:
        return layer.register_forward_hook(ThreadHook(hook)).remove

    # Of ways to hook a layer Dynamo can trace one: a change of the hooks of all modules, undone before the trace ends
    def hook_of_all(module: nn.Module, inputs: Any, output: Any) -> None:
        if module is layer:
            hook(module, inputs, output)

    key = -1 - len(_global_forward_hooks)  # handles count from 0
    _global_forward_hooks[key] = hook_of_all
    return partial(_global_forward_hooks.pop, key)


def list_taps(indices: Sequence[int], taps: Sequence[str]) -> str:
    """Return the names of some taps, separated by commas, or "no tap"."""
    return ", ".join(taps[index] for index in indices) or "no tap"
