"""Finds the exits that a model has: the linear layer of each, the layer that feeds it, and what of it need not run.

A head is told by what it computes, not by how it is written. The linear layer whose output, or its softmax, the model
returns is the end of an exit. Its source is the layer whose output, pooled in a way that fused heads know, is the
input of that linear layer: on the example, and when the layer's output is replaced by numbers that tell pools apart.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...kernels import pooled_features
from ...kernels.head_arguments import head_dtypes_in_words
from ..arguments import is_plain, kind_of, tensor_in_words
from ..dry_run import is_readable
from ..head_modules import SHAPING_MODULES
from .hidden_calls import HiddenCalls, activations, candidates, layers_read
from .module_calls import ModuleCall, watched_run
from .sources import Source, near, pools_for, telling

Found = TypeVar("Found")
_WANTS = "wants a list, tuple, dict or dataclass of the logits [N, K] of two exits or more"
#: Layers after a linear layer that leave its logits what they are, but for a softmax.
_SOFTMAXES = (nn.Softmax, nn.LogSoftmax)
#: Layers that are tried for one exit: where features are zero, all of their size look alike.
_MOST_TRIED = 8


class ExitCalls(NamedTuple):
    """One exit of a model, by the calls of one forward."""

    place: int | str
    """Index, key or attribute of its logits in what the model returns."""
    classes: int
    linear: ModuleCall | None
    """None for a last exit that ends in something else."""
    probabilities: bool
    """The model returns softmax(logits)."""
    hidden: HiddenCalls | None
    """Layers before the linear one that can be fused with it; None if there are none."""
    source: Source | None
    """None if no layer's output is what the first of these reads, but for a pool."""
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
        hidden, source = (None, None) if linear is None or whole is None else search.features_of(linear, whole)
        depth = search.depth(whole, source)
        exits.append(ExitCalls(place, logits.shape[1], linear, probabilities, hidden, source, whole, None, depth))
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
        alike = [(one, False) for one in linears if near(one.y, value) or near(one.y.log_softmax(1), value)]
        alike += [(one, True) for one in linears if near(one.y.softmax(1), value)]
        if len(alike) > 1:
            names = ", ".join(repr(self.name(one.module)) for one, _ in alike)
            raise ValueError(f"model: its exit {place!r} may be that of any of {names}, which give the same logits")
        if not alike:
            rows = logits.double().sum(1, keepdim=True)
            return None, bool((logits >= 0).all()) and near(rows.to(logits.dtype), torch.ones_like(logits[:, :1]))
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

    def features_of(self, linear: ModuleCall, whole: ModuleCall) -> tuple[HiddenCalls | None, Source | None]:
        """Return the hidden layers of a head, if all of it can be fused with them, and the layer that feeds it."""
        hidden, source = self._hidden_of(linear, whole) or (None, self._source_of(linear, whole))
        if source is not None:
            self._taken.add(source.call.module)
        return hidden, source

    def _source_of(self, linear: ModuleCall, whole: ModuleCall) -> Source | None:
        """Return the layer that feeds a head's last linear layer; of layers that return the same, the first by name."""
        if linear.x is None or linear.x.ndim != 2:
            return None
        for source in islice(self._sources(linear, linear.x, whole), _MOST_TRIED):
            if self._is_source(source, linear.module):
                return source
        return None

    def _hidden_of(self, linear: ModuleCall, whole: ModuleCall) -> tuple[HiddenCalls, Source] | None:
        """Return the hidden layers of a head and the layer before the head that feeds them, if there is one."""
        for hidden in candidates(self._calls, linear, whole, near):
            features = hidden.first.x
            if features is None or any(self._runs[call.module] > 1 for call in (hidden.first, hidden.linear)):
                continue
            run = partial(layers_read, hidden, linear.module, self._forward)
            fitting = activations(run(), near)
            sources = self._sources(hidden.first, features, whole) if fitting else iter(())
            for source in islice((one for one in sources if not whole.holds(one.call)), _MOST_TRIED):
                other = telling(source.call.y)
                read = self._tried(source, other, run)
                if read is not None and near(pooled_features(other, source.pool, source.pool_size), read.features):
                    both = [name for name in fitting if name in activations(read, near)]
                    if both:
                        return hidden._replace(activation=both[0]), source
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
            for pool, pool_size in pools_for(call.y, features.shape[1]):
                if near(pooled_features(call.y, pool, pool_size), features):
                    found.setdefault(id(call.y), []).append(Source(call, pool, pool_size))
        inside = [alike for alike in found.values() if whole.holds(alike[0].call)]
        before = [alike for alike in reversed(found.values()) if not whole.holds(alike[0].call)]
        before.sort(key=lambda alike: all(type(source.call.module) in SHAPING_MODULES for source in alike))
        for alike in (*before, *inside):
            yield from sorted(alike, key=lambda source: _length(self.name(source.call.module)))

    def _is_source(self, source: Source, linear: nn.Module) -> bool:
        """Replace a layer's output in a forward, and look whether the linear layer reads what was put in its place."""
        other, read = telling(source.call.y), list[Tensor]()
        hook = linear.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].clone()))
        try:
            ran = self._tried(source, other, self._forward)
        finally:
            hook.remove()
        wanted = pooled_features(other, source.pool, source.pool_size)
        return ran is not None and len(read) == 1 and near(wanted, read[0])

    def _tried(self, source: Source, other: Tensor, run: Callable[[], Found]) -> Found | None:
        """Return what a run finds while a layer returns something else; None of a model that cannot go on with that."""
        hook = source.call.module.register_forward_hook(lambda *_: other)
        try:
            return run()
        except Exception:  # whatever a user's module may raise
            return None
        finally:
            hook.remove()

    def _forward(self) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            return self._model(self._example.clone(memory_format=torch.preserve_format))

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
