"""Finds the exits that a model has: the linear layer of each, the layer that feeds it, and what of it need not run.

A head is told by what it computes, not by how it is written. The linear layer whose output, or its softmax, the model
returns is the end of an exit. Its source is the layer whose output, pooled in a way that fused heads know, is the
input of that linear layer: on the example, and when the layer's output is replaced by numbers that tell pools apart.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels import pooled_features
from ...kernels.head_arguments import head_dtypes_in_words
from ..arguments import is_plain, kind_of, tensor_in_words
from ..dry_run import is_readable
from ..head_modules import SHAPING_MODULES
from .module_calls import ModuleCall, watched_run

_WANTS = "wants a list, tuple, dict or dataclass of the logits [N, K] of two exits or more"
#: Layers after a linear layer that leave its logits what they are, but for a softmax.
_SOFTMAXES = (nn.Softmax, nn.LogSoftmax)
#: Roundings by which two ways to pool may differ, relative to a sample's largest feature; and of narrower numbers.
_ROUNDINGS, _ROUNDINGS_NARROW = 64, 8
#: Layers that are tried for one exit: where features are zero, all of their size look alike.
_MOST_TRIED = 8


class Source(NamedTuple):
    """A layer, and how its output is pooled to become the input of a head's linear layer."""

    call: ModuleCall
    pool: str
    pool_size: tuple[int, int]


class ExitCalls(NamedTuple):
    """One exit of a model, by the calls of one forward."""

    place: int | str
    """Index, key or attribute of its logits in what the model returns."""
    classes: int
    linear: ModuleCall | None
    """None for a last exit that ends in something else."""
    probabilities: bool
    """The model returns softmax(logits)."""
    source: Source | None
    """None if no layer's output is what the linear layer reads, but for a pool."""
    whole: ModuleCall | None
    """The outermost call that returns the logits."""
    silenced: ModuleCall | None
    """The outermost one of which nothing is needed: no source, nothing of another exit."""
    depth: float
    """When what it is computed from was there; the exit with the largest is the model's own classifier."""

    @property
    def tapped(self) -> float:
        """When its head may begin."""
        calls = self.source.call if self.source is not None else self.linear
        return math.inf if calls is None else calls.ended


class FoundExits(NamedTuple):
    """The exits of a model, in the order in which they run; the last one is its own classifier."""

    exits: list[ExitCalls]
    names: dict[nn.Module, list[str]]
    """All names of each layer."""
    softmax: ModuleCall | None
    """The layer that makes probabilities of the last exit's logits, if one does that and nothing else."""
    by_attribute: bool
    """The model returns an object of which exits are attributes."""


def find_exits(model: nn.Module, example: Tensor) -> FoundExits:
    """Find the exits of a model by running it.

    Args:
        model: a copy, which is hooked meanwhile; in eval mode.
        example: two samples for it.

    Raises:
        ValueError: it returns anything but the logits of several exits, or an exit is not to be found; says which.
    """
    output, calls = watched_run(model, example)
    returned, by_attribute = _returned(output, len(example))
    names: dict[nn.Module, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        names.setdefault(layer, []).append(name)
    search = _Search(model, example, calls, names)
    found = [(place, logits, *search.linear_of(place, logits)) for place, logits in returned.items()]
    exits: list[ExitCalls] = []
    for place, logits, linear, probabilities in sorted(found, key=lambda one: one[2].began if one[2] else math.inf):
        whole = search.outermost(logits, linear, [other for _, _, other, _ in found if other is not linear])
        source = None if linear is None or whole is None else search.source_of(linear, whole)
        depth = search.depth(whole, source)
        exits.append(ExitCalls(place, logits.shape[1], linear, probabilities, source, whole, None, depth))
    last = max(reversed(exits), key=lambda one: one.depth)
    exits.sort(key=lambda one: (one is last, one.tapped))
    for one in exits[:-1]:
        search.check_linear(one.place, one.linear)
    exits = [one._replace(silenced=search.silenced(one, returned[one.place], exits)) for one in exits]
    softmax = search.only_call(nn.Softmax, returned[exits[-1].place]) if exits[-1].probabilities else None
    return FoundExits(exits, names, softmax, by_attribute)


def _returned(output: Any, batch: int) -> tuple[dict[int | str, Tensor], bool]:
    """Return the logits by their places, and whether those are attributes."""
    by_attribute = False
    if isinstance(output, Mapping):
        parts: dict[Any, Any] = dict(output)
    elif isinstance(output, (list, tuple)):
        parts = dict(enumerate(output))
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        parts, by_attribute = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}, True
    else:
        got = tensor_in_words(output) if isinstance(output, Tensor) else f"a {kind_of(output)}"
        alone = "; heads for a model without exits are those of EarlyExitNetwork" if isinstance(output, Tensor) else ""
        raise ValueError(f"model: returned {got}, {_WANTS}{alone}")
    if len(parts) < 2:
        raise ValueError(f"model: returned {len(parts)} exit{'s' * (not parts)} in a {kind_of(output)}, {_WANTS}")
    seen: dict[int, Any] = {}
    for place, logits in parts.items():
        if not (is_plain(logits) and logits.ndim == 2 and logits.shape[0] == batch and logits.is_floating_point()):
            got = tensor_in_words(logits) if isinstance(logits, Tensor) else f"a {kind_of(logits)}"
            raise ValueError(f"model: returned {got} at {place!r}, wants logits [{batch}, K]; it {_WANTS}")
        if seen.setdefault(id(logits), place) != place:
            raise ValueError(
                f"model: returned one tensor at {seen[id(logits)]!r} and {place!r}, wants one of each exit"
            )
    classes = {logits.shape[1] for logits in parts.values()}
    if len(classes) > 1 or min(classes) < 2:
        raise ValueError(f"model: returned logits of {sorted(classes)} classes, wants one number of them, at least 2")
    return parts, by_attribute


class _Search:
    """Looks through the calls of one forward, and tries what it finds by others."""

    def __init__(
        self, model: nn.Module, example: Tensor, calls: list[ModuleCall], names: dict[nn.Module, list[str]]
    ) -> None:
        self._model, self._example = model, example
        self._calls, self._names = calls, names
        self._runs = Counter(call.module for call in calls)
        self._taken: set[nn.Module] = set()  # sources of exits: a tap has one head

    def linear_of(self, place: int | str, logits: Tensor) -> tuple[ModuleCall | None, bool]:
        """Return the call of the linear layer that an exit ends in, and whether a softmax follows."""
        linears = [one for one in self._calls if isinstance(one.module, nn.Linear) and one.y.shape == logits.shape]
        value, softmaxed = logits, False
        while True:
            if found := [one for one in linears if one.y is value]:
                return found[0], softmaxed
            after = [one for one in self._calls if one.y is value and type(one.module) in _SOFTMAXES]
            if not after or after[0].x is None:
                break
            value, softmaxed = after[0].x, softmaxed or type(after[0].module) is nn.Softmax
        alike = [(one, False) for one in linears if _near(one.y, value) or _near(one.y.log_softmax(1), value)]
        alike += [(one, True) for one in linears if _near(one.y.softmax(1), value)]
        if len(alike) > 1:
            names = ", ".join(repr(self.name(one.module)) for one, _ in alike)
            raise ValueError(f"model: its exit {place!r} may be that of any of {names}, which give the same logits")
        if not alike:
            rows = logits.double().sum(1, keepdim=True)
            return None, bool((logits >= 0).all()) and _near(rows.to(logits.dtype), torch.ones_like(logits[:, :1]))
        return alike[0]

    def check_linear(self, place: int | str, linear: ModuleCall | None) -> None:
        """Raise ``ValueError`` unless a linear layer was found that runs once, on one tensor."""
        by_hand = "; or put the network together by hand: model/README.md, 'A network with exits of its own'"
        if linear is None:
            raise ValueError(
                f"model: its exit {place!r} is not the output of an nn.Linear that is registered in the model, nor the "
                f"softmax of one; wants a head that ends in one{by_hand}"
            )
        name, runs = self.name(linear.module), self._runs[linear.module]
        if runs > 1:
            raise ValueError(
                f"model: its exit {place!r} is the output of {name!r}, which runs {runs} times in a forward; wants a "
                f"linear layer of its own for each exit: copy.deepcopy of it, say{by_hand}"
            )
        if linear.x is None or not is_readable(linear.x, len(self._example)):
            dtypes = head_dtypes_in_words(self._example.device)
            raise ValueError(
                f"model: its exit {place!r} is the output of {name!r}, which is not called with one tensor that heads "
                f"can read; wants {name}(features), features [N, D] of {dtypes}{by_hand}"
            )

    def source_of(self, linear: ModuleCall, whole: ModuleCall) -> Source | None:
        """Return the layer that feeds a head; of layers that return the same, that with the shortest name."""
        if linear.x is None or linear.x.ndim != 2:
            return None
        for source in islice(self._sources(linear, linear.x, whole), _MOST_TRIED):
            if self._is_source(source, linear.module):
                self._taken.add(source.call.module)
                return source
        return None

    def _sources(self, linear: ModuleCall, features: Tensor, whole: ModuleCall) -> Iterator[Source]:
        """Yield layers whose pooled output is what the linear layer reads, on the example.

        First those before the head, from the last to the first, pools and the like after all others; then those within
        it from the first to the last.
        """
        found: dict[int, list[Source]] = {}  # by the output: layers within each other return the same
        for call in self._calls:
            usable = call.unchanged and self._runs[call.module] == 1 and call.module not in self._taken | {self._model}
            if call.ended > linear.began or not usable or not is_readable(call.y, len(self._example)):
                continue
            for pool, pool_size in _pools(call.y, features.shape[1]):
                if _near(pooled_features(call.y, pool, pool_size), features):
                    found.setdefault(id(call.y), []).append(Source(call, pool, pool_size))
        inside = [alike for alike in found.values() if whole.holds(alike[0].call)]
        before = [alike for alike in reversed(found.values()) if not whole.holds(alike[0].call)]
        before.sort(key=lambda alike: all(type(source.call.module) in SHAPING_MODULES for source in alike))
        for alike in (*before, *inside):
            yield from sorted(alike, key=lambda source: _length(self.name(source.call.module)))

    def _is_source(self, source: Source, linear: nn.Module) -> bool:
        """Replace a layer's output in a forward, and look whether the linear layer reads what was put in its place."""
        other, read = _telling(source.call.y), list[Tensor]()
        hooks = [
            source.call.module.register_forward_hook(lambda *_: other),
            linear.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].clone())),
        ]
        wanted = pooled_features(other, source.pool, source.pool_size)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._model(self._example.clone(memory_format=torch.preserve_format))
        except Exception:  # of a model that cannot go on with it: then it is not known
            return False
        finally:
            for hook in hooks:
                hook.remove()
        return len(read) == 1 and _near(wanted, read[0])

    def depth(self, whole: ModuleCall | None, source: Source | None) -> float:
        """Return when the features of an exit were there: what its head is given, or its linear layer reads."""
        if whole is None:
            return math.inf
        made = [call.ended for call in self._calls if call.y is whole.x and call.ended < whole.began]
        return made[0] if made else whole.began if source is None else source.call.ended

    def outermost(
        self, logits: Tensor, linear: ModuleCall | None, others: Sequence[ModuleCall | None]
    ) -> ModuleCall | None:
        """Return the outermost call, but for the model's own, that returns an exit's logits or their softmax.

        One in which the linear layer of another exit runs is more than a head: a backbone that hooks call heads from.
        """
        heads = (
            call
            for call in self._heads(logits, linear)
            if not any(other is not None and call.holds(other) for other in others)
        )
        return min(heads, key=lambda call: call.began, default=None)

    def _heads(self, logits: Tensor, linear: ModuleCall | None) -> list[ModuleCall]:
        return [
            call
            for call in self._calls
            if call.module is not self._model
            and (call.y is logits or (linear is not None and call.y is linear.y))
            and (linear is None or call.holds(linear))
        ]

    def silenced(self, one: ExitCalls, logits: Tensor, exits: list[ExitCalls]) -> ModuleCall | None:
        """Return the outermost call of an exit that may be left out, the linear layer's at least."""
        if one.source is None:
            return one.linear
        needed = [other.linear for other in exits if other is not one and other.linear is not None]
        needed += [other.source.call for other in exits if other.source is not None]
        heads = [
            call
            for call in self._heads(logits, one.linear)
            if call.x is not None
            and self._runs[call.module] == 1
            and len(call.x) == len(self._example)
            and not any(call.holds(other) for other in needed)
        ]
        return min(heads, key=lambda call: call.began, default=one.linear)

    def only_call(self, kind: type[nn.Module], y: Tensor) -> ModuleCall | None:
        """Return the call that returned ``y``, if it is the only one of a module of that kind."""
        found = [call for call in self._calls if call.y is y and type(call.module) is kind]
        return found[0] if found and self._runs[found[0].module] == 1 else None

    def name(self, module: nn.Module) -> str:
        """Return the shortest name of a layer."""
        return shortest(self._names[module])


def shortest(names: list[str]) -> str:
    """Return the name with the fewest dots, and of those the shortest."""
    return min(names, key=_length)


def _length(name: str) -> tuple[int, int]:
    return name.count("."), len(name)


def _pools(y: Tensor, features: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the pools that make so many features of a sample of ``y``."""
    if y.ndim == 4:
        windows, rest = divmod(features, y.shape[1])
        side = math.isqrt(windows)
        whole = y.shape[2:] == (side, side)  # windows of one position each pool nothing
        if not rest and 0 < side * side == windows and side <= min(y.shape[2:]) and (side == 1 or not whole):
            yield from (("avg", (side, side)), ("max", (side, side)))
    elif y.ndim == 3 and y.shape[2] == features:
        yield from (("avg", (1, 1)), ("max", (1, 1)), ("first", (1, 1)))
    if math.prod(y.shape[1:]) == features:
        yield "none", (1, 1)


def _telling(y: Tensor) -> Tensor:
    """Return numbers in the form of two samples by which pools can be told apart.

    In the first sample all differ, and in every other channel all are negative, as no ReLU leaves them. In the second
    each channel is zero but for one position, from the first to the last, so that what leaves out one of these is
    far off.
    """
    numbers = torch.Generator().manual_seed(0)
    dense = 8.0 * torch.randn(y.shape, generator=numbers) + 4.0
    channels = dense if y.ndim < 3 else dense.movedim(1 if y.ndim == 4 else 2, 1).flatten(2)  # views
    channels[:, 1::2] = -channels[:, 1::2].abs()
    if y.ndim > 2:
        count, positions = channels.shape[1:]
        which = torch.arange(count)
        alone = torch.zeros(count, positions)
        alone[which, which * (positions - 1) // max(count - 1, 1)] = channels[0, :, 0].abs() + 1.0
        channels[1] = alone
    return torch.empty_like(y).copy_(dense)


def _near(mine: Tensor, theirs: Tensor) -> bool:
    """Return whether vectors [N, D] are the same but for rounding."""
    if mine.shape != theirs.shape or not theirs.is_floating_point():
        return False
    roundings = _ROUNDINGS if theirs.dtype in (torch.float32, torch.float64) else _ROUNDINGS_NARROW
    allowed = roundings * torch.finfo(theirs.dtype).eps * theirs.double().abs().amax(1, keepdim=True)
    return bool(((mine.double() - theirs.double()).abs() <= allowed).all())
