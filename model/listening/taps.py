"""Taps: named layers of an unmodified module whose outputs feed heads."""

import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, repeat
from threading import get_ident
from typing import Any

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
        reading = reading or Reading((None,) * len(taps), None)
        self._backbone, self._taps, self._logits = backbone, taps, reading.logits
        self._arguments = reading.arguments
        self._listener = _Listener(taps, on_tap, reading)

    def __enter__(self) -> None:
        listener, part = self._listener, self._logits
        if torch.compiler.is_dynamo_compiling():
            # In the one way that Dynamo can trace: hooks of all modules, gone again before the trace ends.
            layers = map(self._backbone.get_submodule, self._taps)
            made: list[Any] = [partial(_hear_of, layer, listener, index) for index, layer in enumerate(layers)]
            for hook in [*made, *([] if part is None else [partial(_pick_of, self._backbone, part)])]:
                key = -1 - len(_global_forward_hooks)  # handles count from 0
                _global_forward_hooks[key] = hook
                self._keys.append(key)
            return
        try:
            thread = get_ident()
            if self._arguments is not None:
                self._hook(self._backbone._forward_pre_hooks, _ArgumentsHook(listener, self._arguments, thread))
            for index, tap in enumerate(self._taps):
                self._hook(_layer(self._backbone, tap)._forward_hooks, _TapHook(listener, index, thread))
            if part is not None:
                self._hook(self._backbone._forward_hooks, _LogitsHook(part, thread))
        except BaseException:
            self._unhook()
            raise

    def _hook(self, hooks: dict[int, Any], hook: ThreadHook) -> None:
        """Do as register_forward_hook does, without a handle, which takes longer to make than all else."""
        key = next(_keys)
        self._hooks.append(hooks)
        self._keys.append(key)
        hooks[key] = hook

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._unhook()
        if kind is None and (returned := self._listener.returned) != len(self._taps):
            raise RuntimeError(f"heads: layer {self._taps[returned]!r} did not run, unlike in the dry run")

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
    """Hears of the taps in one forward; hooks hold it, and not ``listening``, whose end they would put off."""

    def __init__(self, taps: Sequence[str], on_tap: OnTap, reading: Reading) -> None:
        self._taps, self._on_tap, self._reads = taps, on_tap, reading.taps
        self.returned = 0
        self.arguments: Mapping[Any, Any] | None = None
        """By name, of a batch that was packed."""

    def hear(self, index: int, output: Any) -> None:
        """Hand on what a tap returned, in its turn."""
        read = self._reads[index]
        if read is not None:
            output = read(output) if self.arguments is None else read(self.arguments, output)
        if index != self.returned:
            returned, taps = self.returned, self._taps
            expected = f"{taps[returned]!r} should" if returned < len(taps) else "no tap should any more"
            raise RuntimeError(f"heads: layer {taps[index]!r} ran when {expected}, unlike in the dry run")
        self.returned = index + 1
        self._on_tap(index, output)


class _TapHook(ThreadHook):
    """The hook of one tap."""

    def __init__(self, listener: _Listener, index: int, thread: int) -> None:
        self._hear, self._index, self._thread = listener.hear, index, thread

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if get_ident() == self._thread:
            self._hear(self._index, output)


class _ArgumentsHook(ThreadHook):
    """The hook before a backbone that takes a packed batch."""

    def __init__(self, listener: _Listener, arguments: Callable[[Tensor], Any], thread: int) -> None:
        self._listener, self._arguments, self._thread = listener, arguments, thread

    def __call__(self, _module: nn.Module, inputs: Any) -> None:
        if get_ident() == self._thread:
            self._listener.arguments = self._arguments(inputs[0])


class _LogitsHook(ThreadHook):
    """The hook of a backbone that returns more than its logits."""

    def __init__(self, part: int | str, thread: int) -> None:
        self._part, self._thread = part, thread

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        return logits_of(output, self._part) if get_ident() == self._thread else None


def _hear_of(layer: nn.Module, listener: _Listener, index: int, module: nn.Module, _inputs: Any, output: Any) -> None:
    """Hear of one layer by a hook of all."""
    if module is layer:
        listener.hear(index, output)


def _pick_of(backbone: nn.Module, part: int | str, module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Leave the logits of what one module returns, by a hook of all."""
    return logits_of(output, part) if module is backbone else None


def _layer(backbone: nn.Module, tap: str) -> nn.Module:
    """Return a layer by its name, as ``get_submodule`` does in five times the time."""
    layer: Any = backbone
    for name in tap.split("."):
        layer = layer._modules.get(name)
        if layer is None:
            return backbone.get_submodule(tap)
    return layer


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
