"""Modules that stand in for a model's own: it as a backbone without heads, silent layers, and parts that are heads."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .find_exits import Place, picked


class TakenExit(NamedTuple):
    """An exit that a model has, and how it became one of an :class:`EarlyExitNetwork`."""

    place: Any
    """Index, key or attribute of its logits in what the model returns; a tuple of those where they lie deeper."""
    head: str
    """Name in the model of the module that computes them; "" if they are the output of no module."""
    tap: str
    """The tap of its head; "" for the last exit, which stays the backbone's own classifier."""
    pool: str
    """Pool of its fused head, with its windows; "" for the last exit, and for one that runs as its own code."""
    classes: int
    """K."""
    softmax: bool
    """The model returns softmax(logits) there, in eval mode."""
    how: str
    """What of it runs as the model's own code, in words; "" if all of it is fused, and for the last exit."""
    skips: bool
    """Who leaves there is spared some work of the backbone."""


class Answers(NamedTuple):
    """Where a model returns its exits in one mode, in the order of the network's."""

    places: tuple[Place, ...]
    softmax: tuple[bool, ...]
    """Of each, whether softmax(logits) is returned."""


class SilencedModel(nn.Module):
    """x -> logits [N, K] of a model's last exit; heads before it have been replaced by :class:`SilentLayer`."""

    def __init__(
        self,
        model: nn.Module,
        exits: tuple[TakenExit, ...],
        answering: Answers,
        training: Answers | str,
        *,
        late: tuple[int, ...] = (),
        as_in_training: tuple[str, ...] = (),
    ) -> None:
        """Hold a copy of the model, which shares its parameters.

        Args:
            model: the copy, silenced already.
            exits: from the shallowest to the deepest.
            answering: where it returns them in eval mode.
            training: in training mode; or why it cannot run in that mode.
            late: exits of which heads read the logits once the model has returned, by their indices.
            as_in_training: names of layers that themselves go as in training in eval mode, too; "" is the model.
        """
        super().__init__()
        self.model = model
        self.exits = exits
        self.late = nn.ModuleDict({str(index): nn.Identity() for index in late})
        self._answering, self._training = answering, training
        self._as_in_training = as_in_training

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the last exit; of probabilities the logarithm, which softmax turns back."""
        answers = self._run(self.model, x)
        for index, wait in self.late.items():
            wait(self._logits(answers, int(index)))
        return self._logits(answers, -1)

    def _run(self, model: nn.Module, x: Tensor) -> Any:
        if not self._as_in_training or self.training:
            return model(x)
        with as_in_training(model, self._as_in_training):
            return model(x)

    def train(self, mode: bool = True) -> "SilencedModel":
        """Set the mode; ``ValueError`` if nothing is known of the model in training mode."""
        if mode and isinstance(self._training, str):
            raise ValueError(f"{self._training}; train the model itself, and attach its exits afterwards")
        return super().train(mode)

    def _logits(self, answers: Any, index: int) -> Tensor:
        where = self._training if self.training and isinstance(self._training, Answers) else self._answering
        found = picked(answers, where.places[index])
        if not torch.compiler.is_compiling() and vars(found).get(_IS_SILENT):
            raise ValueError(
                f"model: returned at {where.places[index].name!r} what another exit says, for a batch of {len(found)}, "
                f"unlike when it was attached; wants a forward that always returns its exits in one order"
            )
        return found.log() if where.softmax[index] else found

    def answers_of(self, model: nn.Module, x: Tensor) -> list[Tensor]:
        """Return what the model itself, in eval mode, says at each exit in the order of the network's."""
        x = x.clone(memory_format=torch.preserve_format)  # which it may change in place
        answers = self._run(model, x)
        return [picked(answers, place) for place in self._answering.places]


_LOCK = threading.Lock()
_RUNNING: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # forwards of layers that run as in training mode


@contextmanager
def as_in_training(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Put some of a model's layers, without theirs, into training mode while forwards run, in whatever threads."""
    layers = [model.get_submodule(name) for name in names]
    with _LOCK:
        for layer in layers:
            _RUNNING[layer] = _RUNNING.get(layer, 0) + 1
            layer.training = True
    try:
        yield
    finally:
        with _LOCK:
            for layer in layers:
                _RUNNING[layer] -= 1
                layer.training = _RUNNING[layer] > 0


#: Of a tensor, that nobody wrote it.
_IS_SILENT = "_auxhead_is_silent"


class SilentLayer(nn.Module):
    """Stands where a layer of a head was: returns memory that nobody wrote and nobody reads, and launches nothing."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Replace a module that takes a tensor of N samples first, and returns one [N, *shape]."""
        super().__init__()
        self.__dict__ |= {key: each for key, each in vars(layer).items() if key[0] != "_"}  # its features, say
        self.shape, self.dtype = shape, dtype

    def forward(self, x: Tensor, *_others: Any, **_named: Any) -> Tensor:
        """Return a tensor of the shape that the layer's output had."""
        y = x.new_empty(x.shape[0], *self.shape, dtype=self.dtype)
        if not torch.compiler.is_compiling():
            setattr(y, _IS_SILENT, True)
        return y


class Given(NamedTuple):
    """Stands in the arguments of a step for what is another thing at each run."""

    kind: str
    """"value", of an earlier step; "samples", a number of so many for each; or "tensor", a parameter or buffer."""
    key: Any
    """Number of the value, how many, or name of the tensor."""


class Step(NamedTuple):
    """A call of a layer, or an operator."""

    layer: str
    """Its name in ``BranchHead.layers``; "" for an operator."""
    operator: str
    args: Any
    kwargs: Any
    makes: tuple[int, ...]


class BranchHead(nn.Module):
    """x [N, ...] -> logits [N, K]: what a model computes of one value on the way to one of its exits.

    Layers are the model's own, called whole; operators between them are those that were recorded, in eval mode and in
    training mode.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        in_training: Sequence[Step],
        layers: Mapping[str, nn.Module],
        tensors: Mapping[str, Tensor],
        *,
        is_log: tuple[bool, bool],
    ) -> None:
        """Hold the steps.

        Args:
            steps: in eval mode; value 0 is x, and the last one makes the logits. Without any x is the logits.
            in_training: likewise, in training mode.
            layers: by the names that steps have for them.
            tensors: parameters and buffers that operators read, by names.
            is_log: in eval and in training mode, whether probabilities are made, of which logits are the logarithm.
        """
        super().__init__()
        self._steps, self._in_training = tuple(steps), tuple(in_training)
        self.layers = nn.ModuleList(layers.values())
        self._places = {each: place for place, each in enumerate(layers)}
        self._tensors = {each: f"tensor_{place}" for place, each in enumerate(tensors)}
        for each, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(self._tensors[each], tensor)
            else:
                self.register_buffer(self._tensors[each], tensor)
        self._is_log = is_log

    def forward(self, x: Tensor) -> Tensor:
        """Run the steps."""
        values: dict[int, Any] = {0: x}
        last = x

        def filled(each: Any) -> Any:
            if not isinstance(each, Given):
                return each
            if each.kind == "samples":
                return each.key * x.shape[0]
            return values[each.key] if each.kind == "value" else getattr(self, self._tensors[each.key])

        for step in self._in_training if self.training else self._steps:
            args, kwargs = tree_map(filled, (step.args, step.kwargs), is_leaf=lambda each: isinstance(each, Given))
            call = self.layers[self._places[step.layer]] if step.layer else attrgetter(step.operator)(torch.ops.aten)
            made = [each for each in tree_leaves(call(*args, **kwargs)) if isinstance(each, Tensor)]
            values.update(zip(step.makes, made, strict=False))
            last = made[0]
        return last.log() if self._is_log[self.training] else last
