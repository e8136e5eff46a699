"""``HeadChooser``: how each early exit of a model becomes the head of a network: fused, its own code, or in line."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ..fused_aux_head import FusedAuxHead
from ..head_modules import module_of_activation
from ..hooks import has_hooks
from ..listening.recording import Value, ancestors
from ..module_head import AuxHead, ModuleHead
from ..reading import Extract
from .branch_head import Branch, BranchHead, NotReplayed
from .find_exits import FoundExit, Mode, Tap
from .head_chain import HeadChain


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


@dataclass
class HeadChooser:
    """Chooses heads for a model's early exits, from the shallowest to the deepest."""

    answering: Mode
    early: Sequence[FoundExit]
    """All that get a head, in their order."""
    training: Mode | None
    """None where nothing is known of that mode, in which the network then refuses to run."""
    taken: set[str] = field(default_factory=set)
    """Layers that have a head: each carries one."""
    after: int = -1

    def choose(self, one: FoundExit, its: FoundExit | None, *, after: int | None) -> ChosenHead:
        """Return the head of an exit.

        Args:
            one: in the mode in which the network answers.
            its: the same exit in training mode; None as ``training`` is.
            after: the end of the call that feeds the exit before it, for heads answer in the order of their taps; None
                where that one waits for the whole model, as this one then does.
        """
        if after is None:
            return self._late(one, "the exit before it waits for the whole model")
        self.after = after
        why = one.chain if isinstance(one.chain, str) else ""
        if isinstance(one.chain, HeadChain):
            fused = self._fused(one, one.chain, its)
            if not isinstance(fused, str):
                return fused
            why = fused
        branch = self._branch(one, its, why)
        if not isinstance(branch, str):
            return branch
        return self._answer(one, its, why) or self._late(one, f"{why}; and {branch}")

    def _fused(self, one: FoundExit, chain: HeadChain, its: FoundExit | None) -> ChosenHead | str:
        """Return a fused head for an exit, or for its last layers behind others in line; or why there is none."""
        its_chain = None if its is None else its.chain
        if isinstance(its_chain, str):
            return f"{its_chain}, in training mode"
        if its_chain is not None and its_chain.form != chain.form:
            return "in training mode it is another head"
        for call in {call for each in chain.operations for call in each.calls if call.name and has_hooks(call.layer)}:
            if not any(call in each.calls for each in self.answering.foreign_to(one)):
                return f"{call.name!r} carries hooks, which a fused head would not call"
        behind = None if its_chain is None else its_chain.without_pool()
        return (
            self._fused_at(one, chain, its, its_chain)
            or self._fused_at(one, chain.without_pool(), its, behind)
            or "no layer that runs once, and is not changed in place later, returns what its pool reads in time"
        )

    def _fused_at(
        self, one: FoundExit, chain: HeadChain, its: FoundExit | None, its_chain: HeadChain | None
    ) -> ChosenHead | None:
        for read in (*chain.reads, *([] if chain.rectified is None else [chain.rectified])):
            whole, rectifies = read.made_by not in one.branch, read is chain.rectified
            for tap in self._taps_of(read):
                same = None if self.training is None or its is None else self.training.value_at(tap)
                alike = its_chain is None or same in ([its_chain.rectified] if rectifies else its_chain.reads)
                silenced = self._silenced(one, its, None if whole else (read, same))
                if not (alike and self._is_free(tap, silenced)):
                    continue
                if whole or self.answering.is_in_time(one, tap.order):
                    self.taken.add(tap.layer)
                    head = _fused_head(chain, its_chain or chain, rectifies=rectifies)
                    how = "" if whole else "its own layers before that run in line"
                    return ChosenHead(head, tap, how, Extract(tap.item, chain.layout, mask=None), silenced)
        return None

    def _taps_of(self, value: Value) -> list[Tap]:
        """Return taps of a value in the order in which they are tried: the shortest name, or the first to return."""
        taps = self.answering.taps_of(value)
        read = [one.frontier if isinstance(one.chain, str) else one.chain.reads for one in self.early]
        if sum(value in each for each in read) > 1:  # another head needs one that comes later
            return sorted(taps, key=lambda tap: tap.order)
        return taps

    def _branch(self, one: FoundExit, its: FoundExit | None, why: str) -> ChosenHead | str:
        """Return a head that runs an exit's own code beside the backbone, or why there is none."""
        if len(one.frontier) != 1:
            return f"its branch reads {len(one.frontier)} values of the backbone, not one"
        (source,) = one.frontier
        if source is one.value:
            return "nothing but other exits' layers makes its logits"
        silenced = self._silenced(one, its, None)
        for tap in self._taps_of(source):
            same = None if self.training is None else self.training.value_at(tap)
            if not self._is_free(tap, silenced) or (its is not None and (same is None or its.frontier != [same])):
                continue
            branch = Branch(self.answering.pair, self.answering.foreign_to(one))
            try:
                steps = branch.steps(source, one.value)
                in_training = steps
                if its is not None and self.training is not None and same is not None:
                    other = Branch(self.training.pair, self.training.foreign_to(its))
                    in_training = other.steps(same, its.value)
                    branch.layers |= other.layers
                    branch.tensors |= other.tensors
            except NotReplayed as error:
                return str(error)
            self.taken.add(tap.layer)
            is_log = one.is_softmax, one.is_softmax if its is None else its.is_softmax
            module = BranchHead(steps, in_training, branch.layers, branch.tensors, is_log=is_log)
            extract = None if tap.item is None else Extract(tap.item)
            return ChosenHead(_as_it_is(module, why), tap, "its own code", extract, silenced)
        return "no layer that runs once, and is not changed in place later, returns what its branch reads"

    def _answer(self, one: FoundExit, its: FoundExit | None, why: str) -> ChosenHead | None:
        """Return a head for the logits that an exit's own code makes in line, as a layer of the model returns them."""
        if its is not None and its.is_softmax != one.is_softmax:
            return None
        for tap in self._taps_of(one.value):
            alike = self.training is None or its is None or self.training.value_at(tap) is its.value
            if alike and self._is_free(tap, frozenset()) and self.answering.is_in_time(one, tap.order):
                self.taken.add(tap.layer)
                module = BranchHead([], [], {}, {}, is_log=(one.is_softmax, one.is_softmax))
                extract = None if tap.item is None else Extract(tap.item)
                return ChosenHead(_as_it_is(module, why), tap, "its own code runs in line", extract)
        return None

    def _late(self, one: FoundExit, why: str) -> ChosenHead:
        """Return a head for logits that are known when the model returns."""
        module = BranchHead([], [], {}, {}, is_log=(False, False))  # the backbone makes logits of probabilities
        return ChosenHead(_as_it_is(module, why), None, f"behind the whole model: {why}")

    def _is_free(self, tap: Tap, silenced: frozenset[str]) -> bool:
        within = any(tap.layer == name or tap.layer.startswith(f"{name}.") for name in silenced)
        return tap.layer not in self.taken and not within and tap.order > self.after

    def _silenced(
        self, one: FoundExit, its: FoundExit | None, until: tuple[Value, Value | None] | None
    ) -> frozenset[str]:
        """Return the layers of a branch that need not run any more, in both modes; all, or those after a value."""
        mine = self.answering.silenced(one, set() if until is None else ancestors(until[0]))
        if its is None or self.training is None:
            return frozenset(mine)
        needed = set() if until is None or until[1] is None else ancestors(until[1])
        return frozenset(mine & self.training.silenced(its, needed))


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
    head.pool, head.pool_size, head._map_size = chain.pool, chain.pool_size, chain.map_size
    head.dropout = in_training.dropout
    if head.hidden is not None:
        head.hidden.dropout = in_training.hidden_dropout
    return head
