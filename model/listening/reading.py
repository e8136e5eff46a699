"""``Extract``: what a head reads of its tap's output, which of it is padding; and a backbone's logits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..basics.arguments import kind_of, tensor_in_words

#: Layouts that a tap's output may have; of each, its dimensions in the order in which heads read maps or tokens.
LAYOUTS = {"NCHW": (0, 1, 2, 3), "NHWC": (0, 3, 1, 2), "NTD": (0, 1, 2), "NCL": (0, 2, 1), "TND": (1, 0, 2)}
#: Layouts that are inferred, by the dimension of the channels, of maps and of tokens.
BY_CHANNELS = {4: {1: "NCHW", 3: "NHWC"}, 3: {2: "NTD", 1: "NCL"}}
#: The field of what a backbone returns that is its logits, unless another is named.
LOGITS = "logits"
#: A mask that is found: by the end of its name, HuggingFace's, which tells tokens, or PyTorch's, which tells padding.
AUTO, TOKENS, PADDING = "auto", "attention_mask", "padding_mask"


@dataclass(frozen=True)
class Extract:
    """What a head reads of its tap's output; a view of it, which costs nothing, unless there is padding to leave out.

    Raises:
        ValueError: a layout that there is not.
        TypeError: an item that is neither an index nor a key, or a mask that is no name.
    """

    item: int | str | None = None
    """Index in a tuple or list, key of a dict, or name of a field; None for an output that is a tensor itself."""
    layout: str | None = None
    """"NCHW" or "NHWC" for a map, "NTD" (samples, tokens, features), "NCL" (channels before positions) or "TND" for
    tokens. None is inferred in the dry run; a head with pool="none" reads what there is in the order that it has."""
    mask: str | None = AUTO
    """Name of the backbone's argument [N, T], of any dtype, that tells padding among tokens, which their mean, maximum
    or first leaves out. Padding is not 0 in one whose name ends in "padding_mask", in others not over 0; "~name" is the
    opposite. A sample of padding alone reads as zeros; a batch without the argument has none. "auto" is the one whose
    name ends in "attention_mask" or "padding_mask", if one is [N, T]; with None padding is read as tokens are."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if isinstance(self.item, bool) or not (self.item is None or isinstance(self.item, (int, str))):
            raise TypeError(f"item: got {kind_of(self.item)}, wants an index, a key or None")
        if self.layout is not None and self.layout not in LAYOUTS:
            raise ValueError(f"layout: got {self.layout!r}, wants one of {list(LAYOUTS)} or None")
        if not (self.mask is None or isinstance(self.mask, str) and self.mask.strip("~")):
            raise TypeError(f"mask: got {self.mask!r}, wants the name of an argument of the backbone, {AUTO!r} or None")

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

    taps: tuple[Callable[..., Tensor] | None, ...]
    """Of each tap, what makes a head's input of its output; None for the output itself."""
    logits: int | str | None
    """The part of the backbone's output that is its logits; None for the output itself."""
    arguments: Callable[[Tensor], Mapping[Any, Any]] | None = None
    """Of a backbone that takes a packed batch, what finds the arguments in it, by name: those who make heads' inputs
    are then given these and the tap's output."""


def reading_of(taps: Sequence[str], extract: Mapping[str, AnyExtract], logits: int | str | None) -> Reading | None:
    """Return how the outputs of taps and of the backbone are read; None if all are read as they are."""
    given = (extract.get(tap) for tap in taps)
    reads = tuple(None if each is None or isinstance(each, Extract) and not each.changes else each for each in given)
    return None if logits is None and not any(reads) else Reading(reads, logits)


def with_mask(
    tap: str, extract: Extract, tokens: tuple[int, int] | None, arguments: Mapping[Any, Any], takes: Sequence[str]
) -> Extract:
    """Return an extract with the name of the mask that a batch has for it, if there is one.

    ``tokens`` are N and T, None for a head that pools none; ``takes`` are the backbone's arguments, as far as known.
    ``ValueError`` for a mask that is none of them, does not fit or calls a whole sample padding, and for several.
    """
    name = "" if extract.mask in (None, AUTO) else extract.mask.removeprefix("~")
    unknown = takes and not takes[-1].startswith("**") and name not in {*arguments, *takes}
    if name and (tokens is None or unknown):
        wants = "None: its head pools no tokens" if tokens is None else f"an argument of the backbone: {list(takes)}"
        raise ValueError(f"extract[{tap!r}]: mask: got {extract.mask!r}, wants {wants}")
    if tokens is None or extract.mask is None:
        return replace(extract, mask=None)
    found = _find_mask(tap, extract.mask, tokens, arguments)
    if found is None:
        if extract.mask == AUTO and (perhaps := _perhaps_masks(tokens, arguments)):
            raise ValueError(
                f"heads[{tap!r}]: {perhaps[0]!r} may say where padding is, and how is not known; wants it to be called "
                f"{PADDING} (True at padding) or {TOKENS} (1 at tokens), or extract={{{tap!r}: "
                f"Extract(mask={perhaps[0]!r})}} where it is 1 at tokens, {f'~{perhaps[0]}'!r} where at padding, None "
                "for no mask"
            )
        return extract
    mask, values = found
    if not are_tokens(mask, values).any(1).all():
        raise ValueError(
            f"heads[{tap!r}]: {mask} calls all of a sample padding, wants numbers over 0 at tokens, or 0 if its name "
            f"ends in {PADDING!r}; if it says the opposite, mask={f'~{mask}'.removeprefix('~~')!r} in its Extract"
        )
    return replace(extract, mask=mask)


def reads_by_mask(
    taps: Sequence[str], heads: Sequence[Any], extract: Mapping[str, AnyExtract]
) -> dict[int, Callable[..., Tensor]]:
    """Return by tap what reads its output, given a batch's arguments by name, where their mask may tell padding."""
    found: dict[int, Callable[..., Tensor]] = {}
    for index, (tap, head) in enumerate(zip(taps, heads, strict=True)):
        read = extract.get(tap)
        if head.pool != "none" and isinstance(read, Extract) and read.mask is not None:
            found[index] = partial(read_tokens, tap, read, head)
    return found


def read_tokens(tap: str, extract: Extract, head: Any, arguments: Mapping[Any, Any], output: Any) -> Tensor:
    """Return what a fused head reads of a layer's output: if a mask tells its tokens, their pool [N, D]."""
    x = extract(output)
    found = None if extract.mask is None else _find_mask(tap, extract.mask, x.shape[:2], arguments)
    if found is None or head.pool == "none":
        return x
    if head.hidden is not None and head.hidden.rectifies:
        x = F.relu(x)  # before the pool; once more after it, that changes nothing
    kept = are_tokens(*found).to(x.device)
    if head.pool == "avg":
        total = x.masked_fill(~kept[..., None], 0).sum(1, dtype=torch.promote_types(x.dtype, torch.float32))
        return (total / kept.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)
    if head.pool == "max":
        y = x.masked_fill(~kept[..., None], -torch.inf).amax(1)
    else:
        y = x[torch.arange(x.shape[0], device=x.device), kept.int().argmax(1)]
    return y.masked_fill(~kept.any(1, keepdim=True), 0)


def masks_in(arguments: Mapping[Any, Any]) -> list[tuple[str, Tensor]]:
    """Return, among arguments by name, masks [N, T] that tell padding by their names."""
    named = [(str(name), each) for name, each in arguments.items() if str(name).endswith((TOKENS, PADDING))]
    return [(name, each) for name, each in named if isinstance(each, Tensor) and each.ndim == 2]


def the_mask(extract: Mapping[str, AnyExtract], arguments: Mapping[Any, Any]) -> tuple[str, Tensor] | None:
    """Return the name and the mask [N, T] that taps are read by, or that is called so; None without, or of several."""
    read = {each.mask for each in extract.values() if isinstance(each, Extract)} - {None, AUTO}
    masks = [(str(name), arguments.get(str(name).removeprefix("~"))) for name in read] or masks_in(arguments)
    found = [(name, mask) for name, mask in masks if isinstance(mask, Tensor) and mask.ndim == 2]
    return found[0] if len(found) == 1 else None


def _perhaps_masks(tokens: tuple[int, int], arguments: Mapping[Any, Any]) -> list[str]:
    """Return the arguments [N, T] that tell padding by their names, and not how; [T, T] may be for causal attention."""
    names = [str(name) for name, each in arguments.items() if isinstance(each, Tensor) and each.shape == tokens]
    samples, length = tokens
    return [name for name in names if "pad" in name.lower() or "mask" in name.lower() and samples != length]


def _find_mask(tap: str, mask: str, tokens: tuple[int, ...], arguments: Mapping[Any, Any]) -> tuple[str, Tensor] | None:
    """Return the name of the mask for tokens [N, T], and the tensor that it is in a batch; None if it has none."""
    fitting = {name: each for name, each in arguments.items() if isinstance(each, Tensor) and each.shape == tokens}
    if mask == AUTO:
        found = [name for name in fitting if str(name).endswith((TOKENS, PADDING))]
        if len(found) > 1:
            wants = f"one of them: extract={{{tap!r}: Extract(mask={found[0]!r})}}"
            raise ValueError(f"heads[{tap!r}]: finds the masks {' and '.join(found)}, wants {wants}")
        return (found[0], fitting[found[0]]) if found else None
    name = mask.removeprefix("~")
    if name in fitting:
        return mask, fitting[name]
    nameless = name not in arguments and any(isinstance(each, int) for each in arguments)
    if nameless or arguments.get(name) is not None:
        got = "has no place that is known" if nameless else f"is {parts_in_words(arguments[name])}"
        raise ValueError(
            f"heads[{tap!r}]: {name} {got}, wants {list(tokens)}, as the tap has tokens, at its place or in a dict of "
            f"arguments by name; or extract={{{tap!r}: Extract(mask=None)}}, which reads padding as tokens"
        )
    return None


def are_tokens(mask: str, values: Tensor) -> Tensor:
    """Return which places of a mask of that name are tokens, and no padding."""
    tells_padding = mask.endswith(PADDING) != mask.startswith("~")
    return values == 0 if tells_padding else values > 0


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


def has_logits(output: Any) -> bool:
    """Return whether what a backbone returned has a field of that name."""
    try:
        return isinstance(part_of(output, LOGITS), Tensor)
    except ValueError:
        return False


def logits_of(output: Any, part: int | str | None) -> Any:
    """Return the logits in what a backbone returned; a tensor is taken for them, whatever part is named.

    Torchvision's GoogLeNet and Inception return a tensor in eval mode, and in training mode a tuple with its fields
    ``logits`` and those of auxiliary classifiers.
    """
    try:
        return output if isinstance(output, Tensor) else part_of(output, LOGITS if part is None else part)
    except ValueError as error:
        raise ValueError(f"logits: of what the backbone returns: {error}; wants {parts_to_name(output)}") from None


def parts_to_name(output: Any, most: int = 4) -> str:
    """Return what may be written for the logits in what a backbone returned, by the places of tensors in it."""
    places = range(len(output)) if isinstance(output, (tuple, list)) else output
    places = places if isinstance(places, (range, Mapping)) else getattr(output, "__dict__", ())
    found = [place for place in places if isinstance(part_of(output, place), Tensor)]
    return ", or ".join(f"logits={place!r}" for place in found[:most]) or "logits=0, or logits='name'"


def parts_in_words(output: Any) -> str:
    """Describe what a layer or a backbone returned, with its keys, fields or number of items, for an error."""
    if isinstance(output, Tensor):
        return tensor_in_words(output)
    kind = type(output).__name__
    a = "an" if kind[0] in "AEIO" else "a"
    names = list(output) if isinstance(output, Mapping) else getattr(output, "_fields", None)
    if names is not None:
        return f"{a} {kind} of {', '.join(map(str, names))}"
    return f"{a} {kind} of {len(output)}" if isinstance(output, (tuple, list)) else f"{a} {kind}"
