"""Taps: named layers of an unmodified module whose outputs feed heads."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, repeat
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks

from .hooks import ThreadHook

#: Called at the moment a tapped layer returns, with the index of the tap and the layer's output.
OnTap = Callable[[int, Tensor], None]

#: Keys of hooks; those of handles count up from 0.
_keys = count(-1, -1)


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
    listener = _Listener(taps, on_tap)
    with ExitStack() as stack:
        if torch.compiler.is_dynamo_compiling():
            for index, tap in enumerate(taps):
                stack.callback(_hook_while_traced(backbone.get_submodule(tap), listener, index))
        else:
            all_hooks: list[Any] = []
            keys: list[int] = []
            thread = get_ident()
            # As the block ends, in functions of C alone, so that no interrupt comes before some of them.
            stack.callback(deque, map(OrderedDict.pop, all_hooks, keys, repeat(None)), 0)
            for index, tap in enumerate(taps):
                # As register_forward_hook does, without a handle, which takes longer to make than all else.
                hooks, key, hook = _layer(backbone, tap)._forward_hooks, next(_keys), _TapHook(listener, index, thread)
                all_hooks.append(hooks)
                keys.append(key)
                hooks[key] = hook
        yield
        listener.check_all_returned()


def _hook_while_traced(layer: nn.Module, listener: "_Listener", index: int) -> Callable[[], object]:
    """Hook a layer in the one way that Dynamo can trace, and return what undoes it.

    That is a change of the hooks of all modules, undone before the trace ends.
    """
    key = -1 - len(_global_forward_hooks)  # handles count from 0
    _global_forward_hooks[key] = partial(_hear_of, layer, listener, index)
    return partial(_global_forward_hooks.pop, key)


class _Listener:
    """What hears of the taps in one forward, and looks after their order."""

    def __init__(self, taps: Sequence[str], on_tap: OnTap) -> None:
        self._taps, self._on_tap = taps, on_tap
        self._returned = 0

    def hear(self, index: int, output: Any) -> None:
        if index != self._returned:
            returned, taps = self._returned, self._taps
            expected = f"{taps[returned]!r} should" if returned < len(taps) else "no tap should any more"
            raise RuntimeError(f"heads: layer {taps[index]!r} ran when {expected}, unlike in the dry run")
        self._returned += 1
        self._on_tap(index, output)

    def check_all_returned(self) -> None:
        if self._returned != len(self._taps):
            raise RuntimeError(f"heads: layer {self._taps[self._returned]!r} did not run, unlike in the dry run")


class _TapHook(ThreadHook):
    """The hook of one tap."""

    def __init__(self, listener: _Listener, index: int, thread: int) -> None:
        self._listener, self._index, self._thread = listener, index, thread

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if get_ident() == self._thread:
            self._listener.hear(self._index, output)


def _hear_of(layer: nn.Module, listener: _Listener, index: int, module: nn.Module, _inputs: Any, output: Any) -> None:
    """Hear of one layer by a hook of all."""
    if module is layer:
        listener.hear(index, output)


def _layer(backbone: nn.Module, tap: str) -> nn.Module:
    """Return a layer by its name, as ``get_submodule`` does in five times the time."""
    layer: Any = backbone
    for name in tap.split("."):
        layer = layer._modules.get(name)
        if layer is None:
            return backbone.get_submodule(tap)
    return layer


def list_taps(indices: Sequence[int], taps: Sequence[str]) -> str:
    """Return the names of some taps, separated by commas, or "no tap"."""
    return ", ".join(taps[index] for index in indices) or "no tap"
