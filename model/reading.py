"""``Extract``: what a head reads of its tap's output, and how its dimensions lie; and a backbone's logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .arguments import kind_of, tensor_in_words

#: Layouts that a tap's output may have; of each, its dimensions in the order in which heads read maps or tokens.
LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2), "NTD": (0, 1, 2), "NCL": (0, 2, 1), "TND": (1, 0, 2)}
#: The field of what a backbone returns that is its logits, unless another is named.
LOGITS = "logits"


@dataclass(frozen=True)
class Extract:
    """What a head reads of its tap's output; a view of it, which costs nothing.

    Raises:
        ValueError: a layout that there is not.
        TypeError: an item that is neither an index nor a key.
    """

    item: int | str | None = None
    """Index in a tuple or list, key of a dict, or name of a field; None for an output that is a tensor itself."""
    layout: str | None = None
    """"NCHW" or "NHWC" for a map, "NTD" (samples, tokens, features), "NCL" (channels before positions) or "TND" for
    tokens. None is inferred in the dry run; a head with pool="none" reads what there is in the order that it has."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if isinstance(self.item, bool) or not (self.item is None or isinstance(self.item, (int, str))):
            raise TypeError(f"item: got {kind_of(self.item)}, wants an index, a key or None")
        if self.layout is not None and self.layout not in LAYOUTS:
            raise ValueError(f"layout: got {self.layout!r}, wants one of {list(LAYOUTS)} or None")

    def __call__(self, output: Any) -> Any:
        """Return what a head reads of a layer's output; ``ValueError`` if there is no such item, or not the layout."""
        return self.view(output if self.item is None else part_of(output, self.item))

    def view(self, tensor: Any) -> Any:
        """Return a tensor with its dimensions in the order in which heads read them."""
        if self.layout is None or not isinstance(tensor, Tensor):
            return tensor
        dims = LAYOUTS[self.layout]
        if tensor.ndim != len(dims):
            raise ValueError(f"got {tensor_in_words(tensor)}, wants one of rank {len(dims)} for layout={self.layout!r}")
        return tensor.permute(dims)

    def describe(self, tap: str) -> str:
        """Return in words what is read of a tap."""
        item = "" if self.item is None else f"item {self.item!r} of "
        layout = "" if self.layout is None else f" [{', '.join(self.layout)}]"
        return f"{item}{tap}{layout}"

    @property
    def changes(self) -> bool:
        """Whether a head reads anything but what the layer returns."""
        return self.item is not None or self.layout not in (None, "NCHW", "NTD")


#: What users give for a tap: an :class:`Extract`, or a function of the layer's output that returns what a head reads.
AnyExtract = Extract | Callable[[Any], Tensor]


class Reading(NamedTuple):
    """What comes between a backbone and those who listen to it."""

    taps: tuple[Callable[[Any], Tensor] | None, ...]
    """Of each tap, what makes a head's input of its output; None for the output itself."""
    logits: int | str | None
    """The part of the backbone's output that is its logits; None for the output itself."""


def reading_of(taps: Sequence[str], extract: Mapping[str, AnyExtract], logits: int | str | None) -> Reading | None:
    """Return how the outputs of taps and of the backbone are read; None if all are read as they are."""
    given = (extract.get(tap) for tap in taps)
    reads = tuple(None if each is None or isinstance(each, Extract) and not each.changes else each for each in given)
    return None if logits is None and not any(reads) else Reading(reads, logits)


def check_extract(extract: object, taps: Sequence[str]) -> dict[str, AnyExtract]:
    """Return a copy of what is extracted by tap, or raise ``TypeError`` or ``ValueError``."""
    if extract is None:
        return {}
    if not isinstance(extract, Mapping):
        raise TypeError(f"extract: got {kind_of(extract)}, wants a dict of an Extract or a function by tap")
    for tap, each in extract.items():
        if tap not in taps:
            raise ValueError(f"extract: {tap!r} is not a tap, wants one of {list(taps)}")
        if isinstance(each, type) or not callable(each):
            raise TypeError(f"extract[{tap!r}]: got {kind_of(each)}, wants an Extract or a function")
    return dict(extract)


def part_of(output: Any, part: int | str) -> Any:
    """Return an item of a tuple, list or dict, or a field of an object; ``ValueError`` if it has no such part."""
    try:
        if isinstance(output, Mapping):
            return output[part]
        if isinstance(part, int) and isinstance(output, (tuple, list)):
            return output[part]
        if isinstance(part, str) and not isinstance(output, Tensor):
            return getattr(output, part)
    except (AttributeError, IndexError, KeyError):
        pass
    raise ValueError(f"got {parts_in_words(output)}, which has no {part!r}")


def logits_of(output: Any, part: int | str | None) -> Any:
    """Return the logits in what a backbone returned; a tensor is taken for them, whatever part is named.

    Torchvision's GoogLeNet and Inception return a tensor in eval mode, and in training mode a tuple with its fields
    ``logits`` and those of auxiliary classifiers.
    """
    return output if isinstance(output, Tensor) else part_of(output, LOGITS if part is None else part)


def parts_in_words(output: Any) -> str:
    """Describe what a layer or a backbone returned, with its keys, fields or number of items, for an error."""
    if isinstance(output, Tensor):
        return tensor_in_words(output)
    kind = type(output).__name__
    names = list(output) if isinstance(output, Mapping) else getattr(output, "_fields", None)
    if names is not None:
        return f"a {kind} of {', '.join(map(str, names))}"
    return f"a {kind} of {len(output)}" if isinstance(output, (tuple, list)) else f"a {kind}"
