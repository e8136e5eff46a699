"""``HeadChooser``: how each early exit of a model becomes the head of a network: fused, its own code, or in line."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from torch import nn

from ..heads.fused_aux_head import FusedAuxHead
from ..heads.head import AuxHead
from ..heads.head_pattern import module_of_activation
from ..heads.module_head import ModuleHead
from ..listening.hooks import has_hooks
from ..listening.reading import Extract
from ..listening.recording import Value, ancestors
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
            return self._late(one, "the exit before it waits for the whole model")
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
        return self._late(one, f"{why}; and {branch}")

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

    def _late(self, one: FoundExit, why: str) -> ChosenHead:
        """Return a head for logits that are known when the model returns."""
        module = BranchHead([], [], {}, {}, is_log=(False, False))  # the backbone makes logits of probabilities
        return ChosenHead(_as_it_is(module, why), None, f"behind the whole model: {why}", skips=False)

    def _chosen(
        self, one: FoundExit, head: AuxHead, tap: Tap, how: str, extract: Extract | None, silenced: frozenset[str]
    ) -> ChosenHead:
        """Take a tap for a head."""
        self.taken.add(tap.layer)
        skips = self.answering.skips(one, tap.order, self.before)
        how = how if skips else ", ".join(filter(None, [how, "when the backbone has run"]))
        return ChosenHead(head, tap, how, extract, silenced, skips)

    def _is_free(self, one: FoundExit, tap: Tap, silenced: frozenset[str], *, in_time: bool) -> bool:
        if in_time and not self.answering.is_in_time(one, tap.order, self.before):
            return False
        within = any(tap.layer == name or tap.layer.startswith(f"{name}.") for name in silenced)
        return tap.layer not in self.taken and not within and tap.order > self.after

    def _silenced(
        self, one: FoundExit, its: FoundExit, until: tuple[Value, Value] | None, runs: Set[str]
    ) -> frozenset[str]:
        """Return the layers of a branch that need not run any more, in both modes; all, or those after a value."""
        needed, its_needed = (set(), set()) if until is None else map(ancestors, until)
        return frozenset(self.answering.silenced(one, needed, runs) & self.training.silenced(its, its_needed, runs))


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
