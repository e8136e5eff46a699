"""A backbone's input: one tensor, a tuple of its arguments, or a dict of its keywords."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from itertools import takewhile
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

from ..basics.arguments import check_batch, kind_of, tensor_in_words

#: What a backbone takes for a batch of samples: its argument, or all of them, by place or by name.
Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
BatchT = TypeVar("BatchT", bound=Batch)


def check_input_batch(name: str, x: object, *, may_be_empty: bool = False) -> None:
    """Raise ``TypeError`` unless an argument is a batch, ``ValueError`` unless there is a sample in it."""
    if isinstance(x, (tuple, Mapping)):
        if not (tensors := _tensors(x)):
            raise TypeError(f"{name}: got {kind_of(x)} without a tensor, wants one of the backbone's arguments")
        x = tensors[0]
    check_batch(name, x, may_be_empty=may_be_empty)


def first_tensor(x: Batch) -> Tensor:
    """Return the first tensor of a batch, which tells the number of samples and the device."""
    return x if isinstance(x, Tensor) else _tensors(x)[0]


def on_device(x: BatchT, device: torch.device) -> BatchT:
    """Return a batch on a device, as it lies, for which the host does not wait."""
    return map_tensors(x, lambda each: each.to(device, non_blocking=True))


def tensors_by_name(x: Batch) -> dict[str, Tensor]:
    """Return the tensors of a batch by their places in it; that of one tensor is ""."""
    return {keystr(path): each for path, each in tree_leaves_with_path(as_dicts(x)) if isinstance(each, Tensor)}


def map_tensors(x: BatchT, change: Callable[[Tensor], Tensor]) -> BatchT:
    """Return a batch whose tensors are what ``change`` makes of them."""
    return cast(BatchT, tree_map(lambda each: change(each) if isinstance(each, Tensor) else each, as_dicts(x)))


def two_samples(x: BatchT) -> BatchT:
    """Return two samples of a batch, the first one twice if there is no other, to tell a batch from a constant."""
    samples = first_tensor(x).shape[0]

    def cut(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[:2]] * 2)[:2] if tensor.ndim and tensor.shape[0] == samples else tensor

    return map_tensors(x, cut)


def of_size(x: Tensor, size: int) -> Tensor:
    """Return a batch of so many of an example's samples, which may be in it several times."""
    return torch.cat([x[:size]] * -(-size // len(x)))[:size]


def call_with(backbone: Callable[..., Any], x: Batch) -> Any:
    """Return what a backbone returns for a batch."""
    if isinstance(x, tuple):
        return backbone(*x)
    return backbone(**x) if isinstance(x, Mapping) else backbone(x)


class NotTaken(ValueError):
    """A model could not take its first batch; the cause is what it raised."""


@contextmanager
def first_taken(name: str, x: Batch) -> Iterator[None]:
    """Say of which batch an error is that a model raises at its first one; classes of the user's own stay as they are.

    Args:
        name: of the argument.
        x: what the model is given of it.
    """
    try:
        yield
    except Exception as error:
        if type(error) not in (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
            raise
        shapes = ", ".join(tensor_in_words(each).removeprefix("a tensor ") for each in _tensors(x))
        reason = " ".join(f"{error}".split()) or type(error).__name__
        wants = "a batch [N, ...] of the model's dtype"
        if not isinstance(x, Tensor) and "forward() " in reason and "argument" in reason:
            wants = "the arguments of the model's forward, without labels"
        raise NotTaken(
            f"{name}: the model could not take it (two samples {shapes}): {reason}; wants {wants}"
        ) from error


def argument_names(backbone: nn.Module) -> tuple[str, ...]:
    """Return the names of a backbone's arguments, up to ``*args``; ``**kwargs`` with its stars."""
    try:
        parameters = signature(backbone.forward).parameters.values()
    except (TypeError, ValueError):  # of TorchScript
        return ()
    known = takewhile(lambda each: each.kind is not Parameter.VAR_POSITIONAL, parameters)
    return tuple(str(each) if each.kind is Parameter.VAR_KEYWORD else each.name for each in known)


def arguments_in(x: Batch, names: Sequence[str]) -> dict[Any, Any]:
    """Return a batch's arguments by name, by place where that has none, and what lies in dicts among them."""
    given = x if isinstance(x, tuple) else (x,)
    named = dict(x if isinstance(x, Mapping) else zip([*names, *range(len(names), len(given))], given, strict=False))
    return {name: each for part in (*named.values(), named) if isinstance(part, Mapping) for name, each in part.items()}


def _tensors(x: Batch) -> list[Tensor]:
    return [each for each in tree_leaves(as_dicts(x)) if isinstance(each, Tensor)]


def as_dicts(x: Any, *, in_order: bool = False) -> Any:
    """Return mappings of any kind as dicts, whose values PyTorch finds; with their keys in order if asked for."""
    if isinstance(x, Mapping):
        return {key: as_dicts(x[key], in_order=in_order) for key in (sorted(x, key=str) if in_order else x)}
    return type(x)(as_dicts(each, in_order=in_order) for each in x) if type(x) in (tuple, list) else x
