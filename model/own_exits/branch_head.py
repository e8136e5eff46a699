"""``BranchHead``: a part of a model's forward as a module: its layers, and the operators between them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..listening.recording import STATE, Call, Operation, RecordedPair, Value, ancestors
from .data_movement import is_move

#: Operators that may run between layers: of which nothing depends on a number that the model's code has chosen, as a
#: clamp's or a temperature's, which may be another one later.
_KNOWN = frozenset(
    "mean sum amax amin max _adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d_with_indices relu relu_ "
    "gelu silu hardswish sigmoid tanh add add_ sub mul mul_ div t mm addmm bmm repeat detach _softmax _log_softmax "
    "native_layer_norm native_dropout".split()
)
#: Of those, the ones whose numbers are no choice of the answer's: an epsilon, a probability to drop.
_MAY_HAVE_NUMBERS = ("native_layer_norm", "native_dropout")


class Reference(NamedTuple):
    """Stands for a value in the arguments of a step."""

    number: int


class Samples(NamedTuple):
    """Stands for a number that is a multiple of the samples."""

    times: int


class Named(NamedTuple):
    """Stands for a parameter or buffer of the model."""

    name: str


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
            if isinstance(each, Reference):
                return values[each.number]
            if isinstance(each, Samples):
                return each.times * x.shape[0]
            return getattr(self, self._tensors[each.name]) if isinstance(each, Named) else each

        for step in self._in_training if self.training else self._steps:
            args, kwargs = tree_map(filled, (step.args, step.kwargs), is_leaf=_stands_for)
            call = self.layers[self._places[step.layer]] if step.layer else _operator(step.operator)
            made = [each for each in tree_leaves(call(*args, **kwargs)) if isinstance(each, Tensor)]
            values.update(zip(step.makes, made, strict=False))
            last = made[0]
        return last.log() if self._is_log[self.training] else last


def _stands_for(each: Any) -> bool:
    return isinstance(each, (Reference, Samples, Named))


def _operator(name: str) -> Any:
    packet, overload = name.split(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


class NotReplayed(Exception):
    """What of a branch cannot be run again, with the line of code."""


class Branch:
    """Reads the steps from one value to an exit's logits off two recordings of the same operations."""

    def __init__(self, pair: RecordedPair, foreign: set[Operation]) -> None:
        """Take two recordings, and the operations that other exits depend on."""
        self.layers: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self._pair, self._foreign = pair, foreign

    def steps(self, source: Value, value: Value) -> list[Step]:
        """Return the steps that make one value of another, in their order; ``NotReplayed`` if one cannot be run."""
        before = ancestors(source)
        needed = sorted(ancestors(value) - before, key=lambda each: each.number)
        numbers = {source: 0}
        steps: list[Step] = []
        done = 0
        for operation in needed:
            if operation.number < done:
                continue
            call = next((each for each in operation.calls if self._is_whole(each, source, needed, value)), None)
            if call is not None:
                done = call.ended
                steps.append(self._call(call, numbers))
            else:
                steps.append(self._operator(operation, numbers))
        return steps

    def _is_whole(self, call: Call, source: Value, needed: Sequence[Operation], value: Value) -> bool:
        """Return whether a call is one of a layer by its name that runs for this exit alone, and returns all of it."""
        made_by = source.made_by
        if not call.name or call.ended < 0 or call.autocasts or made_by is None or made_by.number >= call.began:
            return False
        within = self._pair.first.operations[call.began : call.ended]
        if any(each in self._foreign for each in within) or not all(len(place) < 2 for place in call.returned):
            return False
        made = {each for operation in within for each in operation.makes}
        read = {each for operation in needed if operation not in within for each in operation.reads} | {value}
        return made & read <= set(call.returned.values())

    def _call(self, call: Call, numbers: dict[Value, int]) -> Step:
        other = self._pair.second.calls[call.order]
        where = f"the call of {call.name!r}"
        within = self._pair.first.operations[call.began : call.ended]
        made = [None, *within]
        if any(cut.made_by not in made for each in within for cut in each.cuts):
            raise NotReplayed(f"{where} reads what has another gradient than that of what made it")
        for read in (read for each in within for read in each.reads):
            self._check_state(read, where, range(call.began, call.ended))
        args, kwargs = self._filled((call.args, call.kwargs), (other.args, other.kwargs), numbers, where, bare=(float,))
        self.layers[call.name] = call.layer
        return Step(call.name, "", args, kwargs, self._numbered(call.returned.values(), numbers))

    def _operator(self, operation: Operation, numbers: dict[Value, int]) -> Step:
        name = operation.name
        if operation.changes:
            raise NotReplayed(f"{operation} writes to {operation.changes[0].names[0]!r}")
        if operation.cuts:
            raise NotReplayed(f"{operation} reads what has another gradient than that of what made it")
        if not isinstance(operation.function, torch._ops.OpOverload) or not (name in _KNOWN or is_move(operation)):
            raise NotReplayed(f"{operation} cannot be run by itself")
        other = self._pair.second.operations[operation.number]
        bare: tuple[type, ...] = () if name in _MAY_HAVE_NUMBERS or is_move(operation) else (float,)
        if torch.Tag.pointwise in operation.function.tags:
            bare = (float, int)
        parts = (operation.args, operation.kwargs), (other.args, other.kwargs)
        args, kwargs = self._filled(*parts, numbers, str(operation), bare=bare)
        overload = str(operation.function).removeprefix("aten.")
        if name.endswith("_"):  # out of place: the backbone may go on with what it would write to
            overload = overload.replace("_.", ".", 1)
        return Step("", overload, args, kwargs, self._numbered(operation.makes, numbers))

    def _numbered(self, made: Iterable[Value], numbers: dict[Value, int]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(each, len(numbers)) for each in made)

    def _filled(self, parts: Any, other: Any, numbers: dict[Value, int], where: str, *, bare: tuple[type, ...]) -> Any:
        """Return arguments with references in place of values, and of what grows with the samples multiples of them."""
        ours, spec = tree_flatten(parts)
        theirs, other_spec = tree_flatten(other)
        if spec != other_spec:
            raise NotReplayed(f"{where} has other arguments for other numbers of samples")
        pairs = zip(ours, theirs, strict=True)
        return tree_unflatten([self._one(mine, its, numbers, where, bare) for mine, its in pairs], spec)

    def _one(self, mine: Any, its: Any, numbers: dict[Value, int], where: str, bare: tuple[type, ...]) -> Any:
        if isinstance(mine, Value):
            return self._reference(mine, numbers, where)
        if type(mine) is int and mine != its:
            first, second = self._pair.first.samples, self._pair.second.samples
            if mine % first or mine // first * second != its:
                raise NotReplayed(f"{where} takes {mine} for {first} samples, and {its} for {second}")
            return Samples(mine // first)
        if type(mine) in bare:
            raise NotReplayed(f"{where} computes with {mine}, a number of the model's code that may be another later")
        if not (mine is None or isinstance(mine, (bool, int, float, str, torch.dtype, torch.memory_format))):
            raise NotReplayed(f"{where} takes a {type(mine).__name__}")
        return mine

    def _reference(self, value: Value, numbers: dict[Value, int], where: str) -> Reference | Named:
        if value in numbers:
            return Reference(numbers[value])
        if value.leaf in ("parameter", "buffer") and value.tensor is not None and value.names:
            self._check_state(value, where)
            self.tensors[value.names[0]] = value.tensor
            return Named(value.names[0])
        what = "a tensor that is no parameter or buffer" if value.leaf else "more than one value of the backbone"
        raise NotReplayed(f"{where} reads {what}")

    def _check_state(self, value: Value, where: str, by: range = range(0)) -> None:
        """Refuse what is written to by other operators: a head does not run when the model would read it."""
        if value.leaf in STATE and value.written is not None and value.written not in by:
            write = self._pair.first.operations[value.written]
            raise NotReplayed(f"{where} reads {value.names[0]!r}, to which {write} writes")
