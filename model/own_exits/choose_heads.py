"""``HeadChooser``: how each early exit of a model becomes the head of a network: fused, its own code, or in line."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_structure

from ..heads.fused_aux_head import FusedAuxHead
from ..heads.head import AuxHead
from ..heads.head_pattern import module_of_activation
from ..heads.module_head import ModuleHead
from ..listening.hooks import has_hooks
from ..listening.reading import Extract
from ..listening.recording import STATE, Call, Operation, RecordedPair, Value, ancestors
from .find_exits import FoundExit, Mode, Tap
from .head_chain import HeadChain, is_move
from .silenced_model import BranchHead, Given, Step

#: Operators that may run between layers: of which nothing depends on a number that the model's code has chosen, as a
#: clamp's or a temperature's, which may be another one later.
_KNOWN = frozenset(
    "mean sum amax amin max _adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d max_pool2d_with_indices relu relu_ "
    "gelu silu hardswish sigmoid tanh add add_ sub mul mul_ div t mm addmm bmm repeat detach _softmax _log_softmax "
    "native_layer_norm native_dropout".split()
)
#: Of those, the ones whose numbers are no choice of the answer's: an epsilon, a probability to drop.
_MAY_HAVE_NUMBERS = ("native_layer_norm", "native_dropout")


@dataclass
class ChosenHead:
    """The head that stands in for an early exit, and where it listens."""

    head: AuxHead
    tap: Tap | None
    """None if no layer returns what it reads: then it waits until the model has returned."""
    how: str
    """In words, for a report; "" if all of the exit is fused."""
    extract: Extract | None = None
    silenced: frozenset[str] = frozenset()
    """Layers that need not run in the backbone any more."""
    skips: bool = True
    """Who leaves here is spared some work of the backbone."""


@dataclass
class HeadChooser:
    """Chooses heads for a model's early exits, from the shallowest to the deepest."""

    answering: Mode
    early: Sequence[FoundExit]
    """All that get a head, in their order."""
    training: Mode
    """The mode in which the network trains; ``answering`` where nothing is known of that, and it refuses to."""
    taken: set[str] = field(default_factory=set)
    """Layers that have a head: each carries one."""
    after: int = -1
    """The end of the call that feeds the exit before the one that is chosen for now."""
    before: Sequence[FoundExit] = ()
    """The exits that answer before that one."""
    in_time: bool = True
    """Heads listen before other work goes on, for now; else wherever they can."""

    def choose(self, one: FoundExit, its: FoundExit, *, after: int | None) -> ChosenHead:
        """Return the head of an exit.

        Args:
            one: in the mode in which the network answers.
            its: the same exit in ``training``.
            after: the end of the call that feeds the exit before it, for heads answer in the order of their taps; None
                where that one waits for the whole model, as this one then does.
        """
        if after is None:
            return _late("the exit before it waits for the whole model")
        self.after, self.before = after, self.early[: self.early.index(one)]
        why = one.chain if isinstance(one.chain, str) else ""
        for self.in_time in (True, False):
            if isinstance(one.chain, HeadChain):
                fused = self._fused(one, one.chain, its)
                if not isinstance(fused, str):
                    return fused
                why = fused
            branch = self._branch(one, its, why)
            if not isinstance(branch, str):
                return branch
            if self.in_time and (answer := self._answer(one, its, why)) is not None:
                return answer
        return _late(f"{why}; and {branch}")

    def _fused(self, one: FoundExit, chain: HeadChain, its: FoundExit) -> ChosenHead | str:
        """Return a fused head for an exit, or for its last layers behind others in line; or why there is none."""
        its_chain = its.chain
        if isinstance(its_chain, str):
            return f"{its_chain}, in training mode"
        if its_chain.form != chain.form:
            return "in training mode it is another head"
        if self.training.is_cut(its):
            return "what is returned has another gradient than that of what makes it"
        for call in {call for each in chain.operations for call in each.calls if call.name and has_hooks(call.layer)}:
            if not any(call in each.calls for each in self.answering.foreign_to(one)):
                return f"{call.name!r} carries hooks, which a fused head would not call"
        return (
            self._fused_at(one, chain, its, its_chain)
            or self._fused_at(one, chain.without_pool(), its, its_chain.without_pool())
            or "no layer that runs once, and is not changed in place later, returns what its pool reads in time"
        )

    def _fused_at(self, one: FoundExit, chain: HeadChain, its: FoundExit, its_chain: HeadChain) -> ChosenHead | None:
        for read in (*chain.reads, *([] if chain.rectified is None else [chain.rectified])):
            whole, rectifies = read.made_by not in one.branch, read is chain.rectified
            for tap in self._taps_of(read):
                same = self.training.value_at(tap)
                if same is None or same not in ([its_chain.rectified] if rectifies else its_chain.reads):
                    continue
                silenced = self._silenced(one, its, None if whole else (read, same), frozenset())
                if self._is_free(one, tap, silenced, in_time=self.in_time or not whole):
                    head = _fused_head(chain, its_chain, rectifies=rectifies)
                    how = "" if whole else "its own layers before that run in line"
                    return self._chosen(one, head, tap, how, Extract(tap.item, chain.layout, mask=None), silenced)
        return None

    def _taps_of(self, value: Value) -> list[Tap]:
        """Return taps of a value in the order in which they are tried: the shortest name, or the first to return."""
        taps = self.answering.taps_of(value)
        read = [one.frontier if isinstance(one.chain, str) else one.chain.reads for one in self.early]
        if sum(value in each for each in read) > 1:  # another head needs one that comes later
            return sorted(taps, key=lambda tap: tap.order)
        return taps

    def _branch(self, one: FoundExit, its: FoundExit, why: str) -> ChosenHead | str:
        """Return a head that runs an exit's own code beside the backbone, or why there is none."""
        if len(one.frontier) != 1:
            return f"its branch reads {len(one.frontier)} values of the backbone, not one"
        if one.frontier == [one.value]:
            return "nothing but other exits' layers makes its logits"
        if self.training.is_cut(its):
            return "what is returned has another gradient than that of what makes it"
        for source, its_source in zip(one.sources(), its.sources(), strict=False):
            for tap in self._taps_of(source):
                if self.training.value_at(tap) is not its_source:
                    continue
                branch = Branch(self.answering.pair, self.answering.foreign_to(one))
                other = Branch(self.training.pair, self.training.foreign_to(its))
                try:
                    steps, in_training = branch.steps(source, one.value), other.steps(its_source, its.value)
                except NotReplayed as error:
                    return str(error)
                layers = branch.layers | other.layers
                runs = layers.keys()
                silenced = self._silenced(one, its, None, runs)
                if not self._is_free(one, tap, silenced, in_time=self.in_time):
                    continue
                for write in self.answering.writes() + self.training.writes():
                    around = {call.name for call in write.calls}
                    if around & runs and not around & silenced:
                        return f"{write} would run twice"
                is_log = one.is_softmax, its.is_softmax
                module = BranchHead(steps, in_training, layers, branch.tensors | other.tensors, is_log=is_log)
                return self._chosen(one, _as_it_is(module, why), tap, "its own code", _item_of(tap), silenced)
        return "no layer that runs once, and is not changed in place later, returns what its branch reads"

    def _answer(self, one: FoundExit, its: FoundExit, why: str) -> ChosenHead | None:
        """Return a head for the logits that an exit's own code makes in line, as a layer of the model returns them."""
        if its.is_softmax != one.is_softmax or self.training.is_cut(its):
            return None
        for tap in self._taps_of(one.value):
            alike = self.training.value_at(tap) is its.value
            if alike and self._is_free(one, tap, frozenset(), in_time=True):
                module = _as_it_is(BranchHead([], [], {}, {}, is_log=(one.is_softmax, one.is_softmax)), why)
                return self._chosen(one, module, tap, "its own code runs in line", _item_of(tap), frozenset())
        return None

    def _chosen(
        self, one: FoundExit, head: AuxHead, tap: Tap, how: str, extract: Extract | None, silenced: frozenset[str]
    ) -> ChosenHead:
        """Take a tap for a head."""
        self.taken.add(tap.layer)
        skips = self.answering.skips(one, tap.order, self.before, self.early)
        how = how if skips else ", ".join(filter(None, [how, "when the backbone has run"]))
        return ChosenHead(head, tap, how, extract, silenced, skips)

    def _is_free(self, one: FoundExit, tap: Tap, silenced: frozenset[str], *, in_time: bool) -> bool:
        if in_time and not self.answering.is_in_time(one, tap.order, self.before, self.early):
            return False
        within = any(tap.layer == name or tap.layer.startswith(f"{name}.") for name in silenced)
        return tap.layer not in self.taken and not within and tap.order > self.after

    def _silenced(
        self, one: FoundExit, its: FoundExit, until: tuple[Value, Value] | None, runs: Set[str]
    ) -> frozenset[str]:
        """Return the layers of a branch that need not run any more, in both modes; all, or those after a value."""
        needed, its_needed = (set(), set()) if until is None else map(ancestors, until)
        return frozenset(self.answering.silenced(one, needed, runs) & self.training.silenced(its, its_needed, runs))


def _late(why: str) -> ChosenHead:
    """Return a head for logits that are known when the model returns."""
    module = BranchHead([], [], {}, {}, is_log=(False, False))  # the backbone makes logits of probabilities
    return ChosenHead(_as_it_is(module, why), None, f"behind the whole model: {why}", skips=False)


def _item_of(tap: Tap) -> Extract | None:
    return None if tap.item is None else Extract(tap.item)


def _as_it_is(module: nn.Module, why: str) -> ModuleHead:
    head = ModuleHead(module)
    head.why_not_fused = why
    return head


def _fused_head(chain: HeadChain, in_training: HeadChain, *, rectifies: bool) -> FusedAuxHead:
    """Return a fused head that shares the parameters of a chain's layers."""
    layers: list[nn.Module] = [nn.ReLU()] if rectifies else []
    layers += [] if chain.norm is None else [chain.norm]
    if chain.hidden is not None:
        layers += [chain.hidden, module_of_activation(chain.activation)]
    head = FusedAuxHead.from_module(nn.Sequential(*layers, chain.linear).eval())
    head.pool, head.pool_size, head.map_size = chain.pool, chain.pool_size, chain.map_size
    head.dropout = in_training.dropout
    if head.hidden is not None:
        head.hidden.dropout = in_training.hidden_dropout
    return head


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
        """Return arguments with what stands for values, and for what grows with the samples."""
        if tree_structure(parts) != tree_structure(other):
            raise NotReplayed(f"{where} has other arguments for other numbers of samples")
        return tree_map(lambda mine, its: self._one(mine, its, numbers, where, bare), parts, other)

    def _one(self, mine: Any, its: Any, numbers: dict[Value, int], where: str, bare: tuple[type, ...]) -> Any:
        if isinstance(mine, Value):
            return self._reference(mine, numbers, where)
        if type(mine) is int and mine != its:
            first, second = self._pair.first.samples, self._pair.second.samples
            if mine % first or mine // first * second != its:
                raise NotReplayed(f"{where} takes {mine} for {first} samples, and {its} for {second}")
            return Given("samples", mine // first)
        if type(mine) in bare:
            raise NotReplayed(f"{where} computes with {mine}, a number of the model's code that may be another later")
        if not (mine is None or isinstance(mine, (bool, int, float, str, torch.dtype, torch.memory_format))):
            raise NotReplayed(f"{where} takes a {type(mine).__name__}")
        return mine

    def _reference(self, value: Value, numbers: dict[Value, int], where: str) -> Given:
        if value in numbers:
            return Given("value", numbers[value])
        if value.leaf in ("parameter", "buffer") and value.tensor is not None and value.names:
            self._check_state(value, where)
            self.tensors[value.names[0]] = value.tensor
            return Given("tensor", value.names[0])
        what = "a tensor that is no parameter or buffer" if value.leaf else "more than one value of the backbone"
        raise NotReplayed(f"{where} reads {what}")

    def _check_state(self, value: Value, where: str, by: range = range(0)) -> None:
        """Refuse what is written to by other operators: a head does not run when the model would read it."""
        if value.leaf in STATE and value.written is not None and value.written not in by:
            write = self._pair.first.operations[value.written]
            raise NotReplayed(f"{where} reads {value.names[0]!r}, to which {write} writes")
