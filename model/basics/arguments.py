"""Checks of arguments that public calls share; each error names the argument, what it got and what it wants."""

import difflib
from collections.abc import Iterable, Mapping

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
        raise TypeError(f"{name}: got {kind_of(x)}, wants a torch.Tensor [N, ...]")
    check_dense(name, x)
    if not x.ndim or not (may_be_empty or x.shape[0]):
        raise ValueError(f"{name}: got shape {list(x.shape)}, wants [N, ...] with at least one sample")


def check_dense(name: str, x: object) -> None:
    """Raise ``TypeError`` for a tensor that is nested, sparse or of another layout."""
    if isinstance(x, Tensor) and (x.layout is not torch.strided or x.is_nested):
        raise TypeError(f"{name}: got {tensor_in_words(x)}, wants a dense one [N, ...]")


def is_wrapped(value: object) -> bool:
    """Return whether a value is a tensor that has others instead of memory, as one of ``torch.distributed.tensor``."""
    return isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor whose memory kernels can read: not sparse, opaque, nested or wrapped."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested and not is_wrapped(value)


def tensor_in_words(tensor: Tensor) -> str:
    """Describe a tensor for an error."""
    if is_plain(tensor):
        return f"a tensor {list(tensor.shape)} of {tensor.dtype}"
    if is_wrapped(tensor):
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
            raise TypeError(f"heads: got {kind_of(tap)} for a tap, wants the name of a layer, a str{of_one_layer(tap)}")


def of_one_layer(tap: object) -> str:
    """Say how one head reads several layers, if that is what a tap asks for, or return ""."""
    several = isinstance(tap, (tuple, list, set, frozenset)) and len(tap) > 1
    how = (
        "; a head reads one layer: where the forward has the outputs of several, let it call "
        "self.joined(torch.cat([...], 1)) of self.joined = nn.Identity(), whose name is the tap"
    )
    return how if several else ""


def close_names(name: str, names: Iterable[str]) -> str:
    """Return "; close to it: ..." for an error, or "" where no name is close.

    Names that end in this one come first: in a wrapper every layer has a prefix.
    """
    names = list(names)
    inside = [other for other in names if name and other.endswith(f".{name}")]
    close = [*inside, *(other for other in difflib.get_close_matches(name, names, n=3) if other not in inside)]
    return f"; close to it: {', '.join(close[:3])}" if close else ""
