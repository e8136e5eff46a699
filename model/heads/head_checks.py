"""A fused head's parameters: checks before a launch, a width from the first input, and names in a state_dict."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...kernels.launch.head_arguments import head_dtypes, head_dtypes_in_words
from ..basics.arguments import is_plain, tensor_in_words


def check_map_size(x: Any, size: tuple[int, int] | None) -> None:
    """Raise ``ValueError`` for another map than the one that the window of an AvgPool2d is as large as."""
    if size is not None and isinstance(x, Tensor) and (x.ndim != 4 or x.shape[2:] != size):
        raise ValueError(
            f"x: got shape {list(x.shape)}, wants maps of {size[0]}x{size[1]}: the head was made of an AvgPool2d with "
            "this window, and stands for it there alone"
        )


def check_same_classes(tap: str, classes: int, logits: Tensor) -> None:
    """Raise ``ValueError`` for a head that has another number of classes than the backbone, which may be replaced."""
    if logits.ndim != 2:
        raise ValueError(f"backbone: returned {tensor_in_words(logits)}, wants logits [N, {classes}]")
    if classes != logits.shape[1]:
        raise ValueError(f"heads[{tap!r}]: has {classes} classes, wants {logits.shape[1]}, as the backbone has")


def check_readable(parameters: Iterable[tuple[str, Tensor | None]]) -> None:
    """Raise ``ValueError`` for a parameter that is not what its memory says, or of a dtype that no head computes in."""
    for name, tensor in parameters:
        if tensor is None:
            continue
        if not is_plain(tensor) or tensor.is_neg():
            got = "a lazily negated one" if is_plain(tensor) else tensor_in_words(tensor)
            raise ValueError(f"{name}: got {got}, wants a plain tensor")
        if tensor.dtype not in head_dtypes(tensor.device):
            wants = head_dtypes_in_words(tensor.device)
            raise ValueError(f"{name}: got {tensor.dtype} on {tensor.device}, wants {wants}")


@contextmanager
def lazy_after_errors(linear: nn.Module) -> Iterator[None]:
    """Make an ``nn.LazyLinear`` that has not become an ``nn.Linear`` inside one without parameters again."""
    try:
        yield
    except BaseException:
        if isinstance(linear, nn.LazyLinear):
            # PyTorch makes one parameter after the other, and could not go on where there was memory for some.
            for parameter in linear.parameters():
                if not isinstance(parameter, nn.UninitializedParameter):
                    parameter.data = parameter.data.new_empty(0)
                    parameter.__class__ = nn.UninitializedParameter  # type: ignore[assignment]  # as PyTorch does
        raise


#: Of an exit rule, which classifiers have not.
_OF_RULE = "rule._extra_state"


def rename_layers(state_dict: dict[str, Tensor], prefix: str, own: Sequence[str], sources: Sequence[str]) -> None:
    """Rename in place, unless the names are the head's own already, or nothing tells which layer is which.

    Args:
        state_dict: of a whole model.
        prefix: of the head's names in it.
        own: the head's names of its layers with parameters, in the order in which they run.
        sources: names of the same layers in the classifier that the head was made of; ``own`` if there was none.
    """
    its = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    if all(any(key == f"{name}.weight" or key.startswith(f"{name}.parametrizations.") for key in its) for name in own):
        return
    found: Sequence[str] = list(dict.fromkeys(key.rpartition(".")[0] for key in its if key != _OF_RULE))
    if all(any(key.startswith(f"{source}.") for key in its) for source in sources):
        found = sources  # there may be more than weight and bias, those of a parametrization
    if len(found) != len(own):
        return
    renamed: dict[str, Tensor] = {}
    for source, name in zip(found, own, strict=True):
        old = f"{prefix}{source}."
        for key in [key for key in state_dict if key.startswith(old)]:
            renamed[f"{prefix}{name}.{key[len(old) :]}"] = state_dict.pop(key)
    state_dict.update(renamed)
