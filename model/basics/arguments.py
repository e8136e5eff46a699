"""Checks of arguments that public calls share; each error names the argument, what it got and what it wants."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def kind_of(value: object) -> str:
    """Name a value by its type, or a class that was given in place of an instance by itself."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def check_module(name: str, value: object) -> None:
    """Raise ``TypeError`` unless an argument is a module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name}: got {kind_of(value)}, wants an nn.Module")


def check_mode(network: nn.Module, name: str = "network") -> None:
    """Raise ``ValueError`` if any part of the network is in training mode."""
    training = [part for part, module in network.named_modules() if module.training]
    if training:
        its = f"its {training[0]} is " if training[0] else ""
        raise ValueError(f"{name}: {its}in training mode, wants {name}.eval()")


def check_batch(name: str, x: object, *, may_be_empty: bool = False) -> None:
    """Raise ``TypeError`` unless an argument is a tensor, ``ValueError`` unless it is a batch with a sample in it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {kind_of(x)}, wants a torch.Tensor [N, ...]{in_one_tensor(x)}")
    check_dense(name, x)
    if not x.ndim or not (may_be_empty or x.shape[0]):
        raise ValueError(f"{name}: got shape {list(x.shape)}, wants [N, ...] with at least one sample")


def in_one_tensor(x: object) -> str:
    """Say what makes one tensor of a tuple or dict of integers [N, T], but for labels; "" for anything else."""
    given = [("", each) for each in x] if isinstance(x, tuple) else []
    if isinstance(x, Mapping):
        given = [(f"{key}=", each) for key, each in x.items() if "label" not in str(key)]
    shapes = {each.shape if _are_tokens(each) else None for _, each in given}
    if not 1 < len(given) < 9 or len(shapes) > 1 or None in shapes:
        return ""
    parts = ", ".join(f"{name}x[:, {index}]" for index, (name, _) in enumerate(given))
    how = "; torch.stack(arguments, 1) of several [N, T] makes one, for a module around the model whose"
    return (
        f"{how} forward(self, x) returns self.model({parts}); heads on it read padding as tokens, unless the model "
        "pools in a layer of its own"
    )


def _are_tokens(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.ndim == 2 and not (x.is_floating_point() or x.is_complex())


def check_dense(name: str, x: object) -> None:
    """Raise ``TypeError`` for a tensor that is nested, sparse or of another layout."""
    if isinstance(x, Tensor) and (x.layout is not torch.strided or x.is_nested):
        raise TypeError(f"{name}: got {tensor_in_words(x)}, wants a dense one [N, ...]")


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor whose memory kernels can read: none that is sparse, opaque, nested or wrapped.

    Wrapped are the tensors of ``torch.distributed.tensor``, say: they have other tensors instead of memory.
    """
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_nested
        and not is_traceable_wrapper_subclass(value)
    )


def tensor_in_words(tensor: Tensor) -> str:
    """Describe a tensor for an error."""
    if is_plain(tensor):
        return f"a tensor {list(tensor.shape)} of {tensor.dtype}"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}"
    return f"a {'nested' if tensor.is_nested else tensor.layout} tensor"


def check_heads(heads: object) -> None:
    """Raise ``TypeError`` unless ``heads`` maps names of layers to something, ``ValueError`` if it is empty."""
    if not isinstance(heads, Mapping):
        raise TypeError(f"heads: got {kind_of(heads)}, wants a dict of heads by the names of layers")
    if not heads:
        raise ValueError("heads: got none, wants at least one")
    for tap in heads:
        if not isinstance(tap, str):
            raise TypeError(f"heads: got {kind_of(tap)} for a tap, wants the name of a layer, a str")


def close_names(name: str, names: Iterable[str]) -> str:
    """Return "; close to it: ..." for an error, or "" where no name is close.

    Names that end in this one come first: in a wrapper every layer has a prefix.
    """
    names = list(names)
    inside = [other for other in names if name and other.endswith(f".{name}")]
    close = [*inside, *(other for other in difflib.get_close_matches(name, names, n=3) if other not in inside)]
    return f"; close to it: {', '.join(close[:3])}" if close else ""
