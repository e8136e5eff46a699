"""``HiddenCalls``: the layers before a head's last linear one that can be fused with it, told by what they compute."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import ACTIVATIONS
from ...kernels.hidden_layers import MOST_HIDDEN
from ..hooks import has_hooks
from .module_calls import ModuleCall

#: Linear layers that are tried for one exit.
_MOST_TRIED = 2


class HiddenCalls(NamedTuple):
    """Calls of a norm, or none, and of a hidden linear layer, with what comes after that."""

    norm: ModuleCall | None
    linear: ModuleCall
    activation: str
    """A name in ``auxhead.kernels.ACTIVATIONS``."""
    dropouts: tuple[nn.Module, ...]
    """Those after the hidden linear layer."""

    @property
    def first(self) -> ModuleCall:
        """The call that reads the features."""
        return self.linear if self.norm is None else self.norm


class LayersRead(NamedTuple):
    """What the layers of a head read and made in one forward."""

    features: Tensor
    normed: Tensor
    """By the norm; without one the features."""
    read: Tensor
    """By the hidden linear layer."""
    made: Tensor
    hidden: Tensor
    """By the last linear layer."""


Near = Callable[[Tensor, Tensor], bool]


def candidates(calls: Sequence[ModuleCall], last: ModuleCall, whole: ModuleCall, near: Near) -> Iterator[HiddenCalls]:
    """Yield what may be the layers before the last linear one of a head, the nearest first, for any activation."""
    within = [call for call in calls if whole.holds(call) and call.ended < last.began]
    tried = 0
    for linear in reversed(within):
        if not _may_be_hidden(linear, last) or tried == _MOST_TRIED:
            continue
        tried += 1
        norm = None
        for call in within:
            if type(call.module) is nn.LayerNorm and call.ended < linear.began and _is_over_vectors(call, linear, near):
                norm = call
        own = [linear.module, *([] if norm is None else [norm.module])]
        if any(call.module not in own and _has_tensors(call.module) for call in within):
            continue  # a fresh batch norm, say, changes numbers hardly more than rounding does
        dropouts = tuple(
            call.module for call in within if type(call.module) is nn.Dropout and call.began > linear.ended
        )
        yield HiddenCalls(norm, linear, "", dropouts)


def _may_be_hidden(call: ModuleCall, last: ModuleCall) -> bool:
    layer, read = call.module, last.x
    return (
        type(layer) is nn.Linear
        and not has_hooks(layer)
        and layer.out_features <= MOST_HIDDEN
        and call.x is not None
        and call.x.ndim == 2
        and read is not None
        and isinstance(call.y, Tensor)
        and call.y.shape == read.shape
    )


def _has_tensors(layer: nn.Module) -> bool:
    return any(tensor is not None for own in (layer._parameters, layer._buffers) for tensor in own.values())


def _is_over_vectors(norm: ModuleCall, linear: ModuleCall, near: Near) -> bool:
    layer, x = norm.module, norm.x
    if not isinstance(layer, nn.LayerNorm) or has_hooks(layer) or x is None or linear.x is None:
        return False
    return x.ndim == 2 and layer.normalized_shape == x.shape[1:] and near(norm.y, linear.x)


def layers_read(hidden: HiddenCalls, last: nn.Module, forward: Callable[[], object]) -> LayersRead | None:
    """Run a model, and return what the layers read and made; None unless each ran once."""
    reads: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        # as it is now: an activation in place comes later
        reads.setdefault(module, []).append((inputs[0].clone(), y.clone()))

    layers = [call.module for call in (hidden.norm, hidden.linear) if call is not None]
    with ExitStack() as stack:
        for layer in (*layers, last):
            stack.callback(layer.register_forward_hook(note).remove)
        forward()
    if any(len(reads.get(layer, ())) != 1 for layer in (*layers, last)):
        return None
    features, normed = reads[layers[0]][0]
    read, made = reads[hidden.linear.module][0]
    return LayersRead(features, features if hidden.norm is None else normed, read, made, reads[last][0][0])


@torch.no_grad()
def activations(read: LayersRead | None, near: Near) -> list[str]:
    """Return the activations that the last linear layer may have been given the output of, the likeliest first."""
    if read is None or not near(read.normed, read.read):
        return []
    found = {name: made(read.made) for name, made in ACTIVATIONS.items()}
    fitting = [name for name, y in found.items() if near(y, read.hidden)]
    return sorted(fitting, key=lambda name: not torch.equal(found[name], read.hidden))
