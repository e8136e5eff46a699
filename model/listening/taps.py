"""Taps: named layers of an unmodified module whose outputs feed heads."""

import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import count, repeat
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks
from torch.utils.checkpoint import CheckpointFunction

from .hooks import ThreadHook
from .reading import Reading, logits_of

#: Called at the moment a tapped layer returns, with the index of the tap and what a head reads of the layer's output.
OnTap = Callable[[int, Tensor], None]

#: Keys of hooks; those of handles count up from 0.
_keys = count(-1, -1)


class ForwardLeft(BaseException):
    """Raised inside a tap's hook to leave the forward; not an Exception, lest the model catch it."""


# A class, since at each pass a generator's context, and a stack of what to undo, would take the host twice the time.
class listening:
    """While open, a forward of ``backbone`` in this thread calls ``on_tap`` as each tapped layer returns.

    Everything a runner does, it does in ``on_tap``: fork a head to another stream, leave the forward, or cut the
    capture of a graph. Hooks are there only while a runner listens, so that the backbone stays as its owner made it,
    and two threads may run one backbone. A forward that is not left early must run every tap once and in order, as the
    dry run did, lest an answer be taken for another exit's.
    """

    # Dynamo makes one without __init__, which goes as any other does.
    _hooks: list[Any] = []
    _keys: list[int] = []

    def __init__(self, backbone: nn.Module, taps: Sequence[str], on_tap: OnTap, reading: Reading | None = None) -> None:
        """Listen to the layers of these names, with ``reading`` in between, also for the backbone's logits."""
        self._hooks, self._keys = [], []
        self._backbone, self._taps = backbone, taps
        self._reads = (None,) * len(taps) if reading is None else reading.taps
        self._logits = None if reading is None else reading.logits
        self._listener = _Listener(taps, on_tap)

    def __enter__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            # In the one way that Dynamo can trace: hooks of all modules, gone again before the trace ends.
            for index, tap in enumerate(self._taps):
                key = -1 - len(_global_forward_hooks)  # handles count from 0
                layer = self._backbone.get_submodule(tap)
                _global_forward_hooks[key] = partial(_hear_of, layer, self._listener, index, self._reads[index])
                self._keys.append(key)
            if self._logits is not None:
                key = -1 - len(_global_forward_hooks)
                _global_forward_hooks[key] = partial(_pick_of, self._backbone, self._logits)
                self._keys.append(key)
            return
        try:
            thread = get_ident()
            for index, tap in enumerate(self._taps):
                # As register_forward_hook does, without a handle, which takes longer to make than all else.
                hooks, key = _layer(self._backbone, tap)._forward_hooks, next(_keys)
                read = self._reads[index]
                hook: ThreadHook = _TapHook(self._listener, index, thread)
                if read is not None:
                    hook = _ReadingHook(self._listener, index, thread, read)
                self._hooks.append(hooks)
                self._keys.append(key)
                hooks[key] = hook
            if self._logits is not None:
                hooks, key = self._backbone._forward_hooks, next(_keys)
                self._hooks.append(hooks)
                self._keys.append(key)
                hooks[key] = _LogitsHook(self._logits, thread)
        except BaseException:
            self._unhook()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._unhook()
        if kind is None:
            self._listener.check_all_returned()

    def __del__(self) -> None:
        """Take the hooks off where an interrupt came before ``__exit__`` did; off already, they stay off."""
        self._unhook()

    def _unhook(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            for key in self._keys:
                _global_forward_hooks.pop(key, None)
        else:  # in functions of C alone, so that no interrupt comes between them
            deque(map(OrderedDict.pop, self._hooks, self._keys, repeat(None)), 0)


class _Listener:
    """What hears of the taps in one forward, and looks after their order."""

    def __init__(self, taps: Sequence[str], on_tap: OnTap) -> None:
        self.on_tap = on_tap
        self.returned = 0
        self._taps = taps

    def hear(self, index: int, output: Any) -> None:
        if index != self.returned:
            self.refuse(index)
        self.returned += 1
        self.on_tap(index, output)

    def refuse(self, index: int) -> NoReturn:
        returned, taps = self.returned, self._taps
        expected = f"{taps[returned]!r} should" if returned < len(taps) else "no tap should any more"
        raise RuntimeError(f"heads: layer {taps[index]!r} ran when {expected}, unlike in the dry run")

    def check_all_returned(self) -> None:
        if self.returned != len(self._taps):
            raise RuntimeError(f"heads: layer {self._taps[self.returned]!r} did not run, unlike in the dry run")


class _TapHook(ThreadHook):
    """The hook of one tap."""

    def __init__(self, listener: _Listener, index: int, thread: int) -> None:
        self._listener, self._index, self._thread = listener, index, thread

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if get_ident() == self._thread:
            listener, index = self._listener, self._index
            if index != listener.returned:  # as ``hear`` does: a call less at each tap of each pass
                listener.refuse(index)
            listener.returned = index + 1
            listener.on_tap(index, output)


class _ReadingHook(_TapHook):
    """The hook of a tap of which a head reads something else than its output."""

    def __init__(self, listener: _Listener, index: int, thread: int, read: Callable[[Any], Tensor]) -> None:
        super().__init__(listener, index, thread)
        self._read = read

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if get_ident() == self._thread:
            super().__call__(module, inputs, self._read(output))


class _LogitsHook(ThreadHook):
    """The hook of a backbone that returns more than its logits."""

    def __init__(self, part: int | str, thread: int) -> None:
        self._part, self._thread = part, thread

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        return logits_of(output, self._part) if get_ident() == self._thread else None


def _hear_of(
    layer: nn.Module,
    listener: _Listener,
    index: int,
    read: Callable[[Any], Tensor] | None,
    module: nn.Module,
    _inputs: Any,
    output: Any,
) -> None:
    """Hear of one layer by a hook of all."""
    if module is layer:
        listener.hear(index, output if read is None else read(output))


def _pick_of(backbone: nn.Module, part: int | str, module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Leave the logits of what one module returns, by a hook of all."""
    return logits_of(output, part) if module is backbone else None


def _layer(backbone: nn.Module, tap: str) -> nn.Module:
    """Return a layer by its name, as ``get_submodule`` does in five times the time."""
    layer: Any = backbone
    for name in _path(tap):
        layer = layer._modules.get(name)
        if layer is None:
            return backbone.get_submodule(tap)
    return layer


@lru_cache(maxsize=1024)
def _path(tap: str) -> list[str]:
    return tap.split(".")


def version_of(y: Tensor) -> int | None:
    """Return the count of writes to a tensor; None where there is none: in inference mode, and while Dynamo traces."""
    return None if torch.compiler.is_compiling() or y.is_inference() else y._version


def warn_if_checkpointed(tap: str) -> None:
    """Warn if reentrant checkpointing calls: it runs without gradients, and computes anew in the backward pass."""
    frame = None if torch.compiler.is_compiling() else sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            warnings.warn(
                f"heads: layer {tap!r} runs under reentrant checkpointing, so that its head's loss trains the head and "
                "no layer before it; call torch.utils.checkpoint.checkpoint with use_reentrant=False",
                stacklevel=4,
            )
            return
        frame = frame.f_back


def list_taps(indices: Sequence[int], taps: Sequence[str]) -> str:
    """Return the names of some taps, separated by commas, or "no tap"."""
    return ", ".join(taps[index] for index in indices) or "no tap"
