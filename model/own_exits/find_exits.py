"""``find_exits``: the exits that a model has, their order, and how the head of each can be taken over.

All is read off recordings of the model, in eval and in training mode: what each exit is computed from, where its branch
leaves the backbone, and what lies in between. Numbers tell whether unknown code ends in a softmax, and whether eval
mode says what an exit says; they prove nothing else.
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ...kernels.launch.check_arguments import check_classes
from ..basics.arguments import kind_of, tensor_in_words
from ..basics.bad_input import BadInput
from ..listening.hooks import has_hooks
from ..listening.recording import Call, Operation, RecordedPair, Value, ancestors, at_place
from ..listening.rounding import are_probabilities, relative_error
from .head_chain import SOFTMAXES, HeadChain, find_chain, is_move, parts_along, same_elements

_WANTS = "wants a list, tuple, dict or dataclass of the logits [N, K] of two exits or more, or their torch.stack"
BY_HAND = "; or put the network together by hand: docs/own_exits.md, 'If it is refused'"


class Place(NamedTuple):
    """Where a model returns the logits of an exit."""

    path: tuple[Any, ...]
    """Indices, keys and fields that lead to them; () for what is returned itself."""
    dim: int | None = None
    """Of a tensor of several exits, the dimension along which they are stacked; ``path`` ends in the index there."""

    @property
    def name(self) -> Any:
        """What people call it: an index or a key, or several of them."""
        return self.path[0] if len(self.path) == 1 else self.path


class Tap(NamedTuple):
    """A layer that returns a value, as itself or as an item of what it returns."""

    layer: str
    item: Any
    """None if it returns the value itself."""
    order: int
    """Its place among the ends of calls."""


@dataclass(eq=False)
class FoundExit:
    """One exit of a model, in one mode."""

    place: Place
    value: Value
    """What is returned: logits, or the softmax of them."""
    chain: HeadChain | str
    """The head, if all of it is known, or what is not."""
    needs: set[Operation]
    """All operations that it depends on."""
    branch: set[Operation] = field(default_factory=set)
    """Those that no other exit depends on."""
    shared: set[Operation] = field(default_factory=set)
    """Those that another one depends on, too."""
    frontier: list[Value] = field(default_factory=list)
    """What the branch reads of the backbone."""
    is_softmax: bool = False
    """The model returns softmax(logits)."""

    def sources(self) -> list[Value]:
        """Return the one value that the branch reads, and those that activations written as functions make it of."""
        if len(self.frontier) != 1:
            return []
        found = list(self.frontier)
        while (made_by := found[-1].made_by) is not None and len(made_by.reads) == 1 and not made_by.is_random:
            if torch.Tag.pointwise not in getattr(made_by.function, "tags", ()):
                break
            found.append(made_by.reads[0])
        return found

    @property
    def key(self) -> tuple[str, ...]:
        """Names of the parameters that it depends on, in the order of their first use: the same in both modes."""
        used = sorted(self.needs, key=lambda each: each.number)
        return tuple(dict.fromkeys(read.names[0] for each in used for read in each.reads if read.leaf == "parameter"))


class Mode:
    """A model in one mode: its recordings for two and for three samples, and what they tell of its exits."""

    def __init__(self, model: nn.Module, pair: RecordedPair, words: str) -> None:
        """Read the exits off two recordings, which ``words`` tell people of."""
        self.model, self.pair, self.words = model, pair, words
        self.recording = pair.first
        self.exits = [FoundExit(place, value, "", ancestors(value)) for place, value in self._returned()]
        for one in self.exits:
            foreign = self.foreign_to(one)
            one.chain = find_chain(model, one.value, foreign)
            one.branch, one.shared = one.needs - foreign, one.needs & foreign
            reads = {read: None for each in one.branch for read in each.reads if read.made_by not in one.branch}
            one.frontier = [read for read in reads if read.from_input]
            if not one.branch:
                one.frontier = [one.value]
            if isinstance(one.chain, HeadChain):
                one.is_softmax = one.chain.is_softmax
            else:
                one.is_softmax = are_probabilities(picked(self.recording.output, one.place))
        self._runs = Counter(call.layer for call in self.recording.calls)

    def runs_once(self, layer: nn.Module) -> bool:
        """Return whether a layer is called once in a forward."""
        return self._runs[layer] == 1

    def is_cut(self, one: FoundExit) -> bool:
        """Return whether the logits are returned with another gradient than that of what makes them."""
        moved = (cut for each in self.recording.operations if is_move(each, backwards=False) for cut in each.cuts)
        return any(one.value in same_elements(cut) for cut in (*self.recording.cuts, *moved))

    def foreign_to(self, one: FoundExit) -> set[Operation]:
        """Return the operations that exits but one depend on."""
        return set().union(*(other.needs for other in self.exits if other is not one))

    def _returned(self) -> list[tuple[Place, Value]]:
        """Return the exits' logits: tensors [N, K] of one K, and parts of stacks of them."""
        first, second = self.pair.first, self.pair.second
        found: list[tuple[Place, Value]] = []
        for path, value in first.returned.items():
            sizes = [(mine, its) for mine, its in zip(value.shape, second.returned[path].shape, strict=True)]
            samples = [dim for dim, size in enumerate(sizes) if size == (first.samples, second.samples)]
            if not value.dtype.is_floating_point:
                continue
            if len(sizes) == 2 and samples[:1] == [0]:
                same = [each for each in same_elements(value) if each.shape == value.shape]
                found.append((Place(path), same[-1]))
            elif len(sizes) == 3 and samples and samples[0] < 2:
                dim = 1 - samples[0]
                for index, part in enumerate(parts_along(value, dim) or ()):
                    found.append((Place((*path, index), dim), part))
        return _without_features(found)

    def check(self, *, may_be_random: bool = False) -> None:
        """Raise ``ValueError`` unless what the exits are computed from is known, and each by itself."""
        if self.recording.draws:
            so = ", so that what it computes may differ each time"
            self._refuse("draws numbers by Python's random or by NumPy", so, "those of PyTorch, which are tensors")
        for name in self.recording.replaced:
            wants = f"one that is written to, as by self.{name}.copy_(...)"
            self._refuse(
                f"puts another tensor in place of its {name!r}", ", which a copy that shares it does not see", wants
            )
        for read in self.recording.host_reads:
            by = (
                "input" if read.value.from_input else "parameters" if read.value.from_state else "numbers that it draws"
            )
            got = f"the host reads a number that depends on the {by}, {read.how} at {read.line}"
            so = ", so that what follows may differ from one to another"
            self._refuse(got, so, "a forward that returns all exits, whatever they say")
        self._check_returned()
        for one in self.exits:
            where = f"its exit {one.place.name!r}"
            if not one.value.from_input:
                so = ", or not by PyTorch's operators in one thread"
                self._refuse(f"{where} does not depend on the input", so, "logits that they make of it")
            last = same_elements(one.value, backwards=False)[-1].made_by
            if last is not None and last.name.rstrip("_") == "sigmoid":
                got = f"{where} is a sigmoid, which judges each class by itself, in {last}"
                self._refuse(got, "", "logits, of which one class is the answer")
            for operation, leaf in ((each, read) for each in one.needs for read in each.reads):
                if leaf.leaf == "unknown" and not self._is_constant(leaf):
                    got = f"{where} depends on a tensor that was made unseen, read by {operation}"
                    self._refuse(got, "", "one that PyTorch's operators make of the input")
            for other in self.exits:
                if other is not one and (reader := _reader_of(other, one)) is not None:
                    got = f"{where} depends on what its exit {other.place.name!r} says, by {reader}"
                    self._refuse(got, "", "exits of which each does without the others' logits")
            drawn = min((each for each in one.needs if each.is_random), key=lambda each: each.number, default=None)
            if drawn is not None and not may_be_random:
                wants = "heads and a backbone that compute the same each time"
                self._refuse(f"{where} is drawn by chance", f", in {drawn}", wants)

    def _refuse(self, got: str, so: str, wants: str) -> NoReturn:
        raise BadInput(f"model: {got}{self.words}{so}; wants {wants}{self._by_hand()}")

    def choosing(self) -> tuple[str, ...]:
        """Return the layers that run heads of several exits, and so may choose by their mode which; "" is the model."""
        around = Counter(call for one in self.exits for call in {call for each in one.branch for call in each.calls})
        return tuple({"": 0} | {call.name: 0 for call, exits in around.items() if exits > 1 and call.name})

    def check_says_what(self, own: "Mode") -> None:
        """Raise ``ValueError`` if the model returns in eval mode what is none of the exits: their mean, say."""
        ours = torch.stack([_probabilities(self, one) for one in self.exits])
        for one in own.exits:
            rows, near = _probabilities(own, one), torch.finfo(one.value.dtype).eps ** 0.5  # attention has faster ways
            if rows.shape == ours.shape[1:] and not ((ours - rows).abs() <= near * rows.amax()).all(2).any(0).all():
                raise BadInput(
                    "model: what it returns in eval mode is what none of the exits says that training mode returns: "
                    "their mean, say; wants a module around it that returns the exits themselves in both modes"
                )

    def _by_hand(self) -> str:
        """Return the line that makes a network in which each exit stays the model's own code; else where to read on."""
        same = {one: same_elements(one.value, backwards=False) for one in self.exits}
        made = sorted(same, key=lambda one: -1 if (by := same[one][-1].made_by) is None else by.number)
        plain = all(len(one.place.path) == 1 and one.place.dim is None and not one.is_softmax for one in made)
        found = [[tap.layer for y in same[one] for tap in self.taps_of(y) if tap.item is None] for one in made[:-1]]
        taps = [each[0] for each in found if each]
        work = [sum(each.flops for each in one.needs) for one in made]
        if self.words or not plain or not taps or len(taps) < len(found) or work[-1] < max(work):
            return BY_HAND
        heads = ", ".join(f'"{tap}": nn.Identity()' for tap in taps)
        return (
            "; or, if they are always returned, write "
            f"EarlyExitNetwork(model, {{{heads}}}, rules=0.9, logits={made[-1].place.name!r})"
        )

    def _check_returned(self) -> None:
        output = self.recording.output
        if len(self.exits) < 2:
            at = [f"{tensor_in_words(at_place(output, path))} at {'.'.join(map(str, path)) or 'the top'}"
                  + (f", made by {value.made_by}" if len(value.shape) == 3 and value.made_by is not None else "")
                  for path, value in self.recording.returned.items()]  # fmt: skip
            got = ", ".join(at[:4]) or f"a {kind_of(output)}"
            found = "1 exit" if self.exits else "no exits"
            raise BadInput(
                f"model: returned {got}{self.words}, in which {found} can be told, {_WANTS}; heads for a model without "
                "exits are those of attach"
            )
        classes = {one.value.shape[1]: one.place.name for one in self.exits}
        check_classes("model", max(classes))
        if len(classes) > 1:
            got = ", ".join(f"{count} classes at {name!r}" for count, name in classes.items())
            raise BadInput(f"model: returned logits of {got}{self.words}; wants one number of classes")
        seen: dict[Value, Any] = {}
        for one in self.exits:
            name = one.place.name
            if (first := seen.setdefault(one.value, name)) != name:
                raise BadInput(f"model: returned one tensor at {first!r} and {name!r}, wants one of each exit")

    def _is_constant(self, leaf: Value) -> bool:
        """Return whether an unknown tensor was the same for other inputs: one that the model's code holds somewhere."""
        pairs = zip(self.pair.first.operations, self.pair.second.operations, strict=True)
        reads = (each for mine, its in pairs for each in zip(mine.reads, its.reads, strict=True))
        mine, other = leaf.tensor, next(twin.tensor for read, twin in reads if read is leaf)
        return mine is not None and other is not None and mine.shape == other.shape and bool((mine == other).all())

    def taps_of(self, value: Value) -> list[Tap]:
        """Return the layers whose hooks could hand a value to a head, those with the shortest names first."""
        found = []
        for call in self.recording.calls:
            places = [place for place, each in call.returned.items() if each is value and len(place) < 2]
            usable = call.name and self._runs[call.layer] == 1 and value.written is None
            if usable and places and value.feeds_head(self.recording.samples):
                other = self.pair.second.calls[call.order].returned.get(places[0])
                if other is not None and other.feeds_head(self.pair.second.samples):  # the samples come first
                    found.append(Tap(call.name, places[0][0] if places[0] else None, call.order))
        return sorted(found, key=lambda tap: (tap.layer.count("."), len(tap.layer)))

    def value_at(self, tap: Tap) -> Value | None:
        """Return what a tap of another mode hands over in this one; None if it would not."""
        calls = [call for call in self.recording.calls if tap.layer and call.name == tap.layer]
        if len(calls) != 1:
            return None
        value = calls[0].returned.get(() if tap.item is None else (tap.item,))
        return value if value is not None and value.written is None else None

    def is_in_time(self, one: FoundExit, order: int, before: Sequence[FoundExit], early: Sequence[FoundExit]) -> bool:
        """Return whether work of exits that do not answer ``before``, and not its own, follows a layer's return.

        Heads that a model calls behind its backbone are no longer in time: nothing could be skipped.
        """
        ready = max((each.made_by.number for each in one.frontier if each.made_by is not None), default=-1)
        return not any(ready < number < self._end(order) for number in self._work_behind(one, before, early))

    def skips(self, one: FoundExit, order: int, before: Sequence[FoundExit], early: Sequence[FoundExit]) -> bool:
        """Return whether such work is still to come when a layer returns, and is spared who leaves there."""
        return any(number >= self._end(order) for number in self._work_behind(one, before, early))

    def _end(self, order: int) -> int:
        return next(call.ended for call in self.recording.calls if call.order == order)

    def _work_behind(self, one: FoundExit, before: Sequence[FoundExit], early: Sequence[FoundExit]) -> list[int]:
        """Return the places of what exits that do not answer ``before`` need and this one does not, but for heads.

        Of the exit that is none of the ``early`` ones, the classifier, all but the last layer is the backbone's.
        """
        later = set().union(*(other.needs for other in self.exits if other not in (one, *before))) - one.needs
        heads = (
            other.chain.operations if other in early else [each for each in (other.chain.logits.made_by,) if each]
            for other in self.exits
            if isinstance(other.chain, HeadChain)
        )
        return [each.number for each in later.difference(*heads) if each.flops]

    def writes(self) -> list[Operation]:
        """Return the operations that write to a parameter, a buffer or an attribute."""
        return [each for each in self.recording.operations if each.changes]

    def silenced(self, one: FoundExit, needed: set[Operation], runs: Set[str]) -> set[str]:
        """Return layers that run for nothing once an exit has a head of its own, the outermost, by name.

        A layer that writes to buffers, or makes what is written to them, does so for something, unless the head
        ``runs`` the layer that writes.
        """
        found: set[str] = set()
        passed: list[Call] = []  # calls that stay: what they run in turn is theirs
        foreign = self.foreign_to(one) | needed
        writes = [each for each in self.writes() if runs.isdisjoint(call.name for call in each.calls)]
        written = {call for each in writes for before in ancestors(each.makes[-1]) for call in before.calls}
        for call in sorted(self.recording.calls, key=lambda each: (each.began, -each.ended, -each.order)):
            within = self.recording.operations[call.began : call.ended]
            of_the_branch = not any(each in foreign for each in within) and any(each in one.branch for each in within)
            if not (call.name and of_the_branch):
                continue
            if not any(outer.began <= call.began and call.ended <= outer.ended for outer in passed):
                passed.append(call)
                if self._may_be_silent(call) and call not in written:
                    found.add(call.name)
        return found

    def _may_be_silent(self, call: Call) -> bool:
        layer, given = call.layer, call.args[0] if call.args else None
        if has_hooks(layer) or "forward" in vars(layer) or list(call.returned) != [()] or not self.runs_once(layer):
            return False
        inside = set(layer.modules())
        for other in self.recording.calls:  # others may call its layers by their names
            if other.layer in inside and not call.began <= other.began <= other.ended <= call.ended:
                return False
        own = {id(each) for each in (*layer.parameters(), *layer.buffers())}
        for operation in self.recording.operations:  # others may read or write its parameters and buffers by its name
            around = [held for each in operation.calls for held in (each.layer._parameters, each.layer._buffers)]
            theirs = own - {id(each) for held in around for each in held.values()}
            used = (*operation.reads, *operation.changes)
            if call not in operation.calls and any(id(each.tensor) in theirs for each in used):
                return False
        samples = (self.recording.samples,)
        return isinstance(given, Value) and given.shape[:1] == call.returned[()].shape[:1] == samples


def _without_features(found: list[tuple[Place, Value]]) -> list[tuple[Place, Value]]:
    """Leave out what lies beside the logits: the softmax of those, one number of a sample, features of other widths."""
    logits = {each for _, value in found for each in same_elements(value, backwards=False)}
    found = [one for one in found if logits.isdisjoint(_softmax_of(one[1]))]
    found = [one for one in found if one[1].shape[1] > 1] or found
    widths = Counter(value.shape[1] for _, value in found)
    if len(widths) < 2:
        return found
    return [
        (place, value)
        for place, value in found
        if not any(
            other.shape[1] != value.shape[1] and value.made_by is not None and value.made_by in ancestors(other)
            for _, other in found
        )
    ]


def _softmax_of(value: Value) -> list[Value]:
    """Return the logits of which a value is the softmax, or the logarithm of that."""
    made_by = same_elements(value, backwards=False)[-1].made_by
    is_softmax = made_by is not None and made_by.name in SOFTMAXES and made_by.args[1] in (1, -1)
    return same_elements(made_by.reads[0], backwards=False) if made_by is not None and is_softmax else []


def picked(output: Any, place: Place) -> Tensor:
    """Return the logits of an exit out of what a model returned."""
    if place.dim is None:
        found: Tensor = at_place(output, place.path)
        return found
    return at_place(output, place.path[:-1]).select(place.dim, place.path[-1])


def _probabilities(mode: Mode, one: FoundExit) -> Tensor:
    y = picked(mode.recording.output, one.place).double()
    return y if one.is_softmax else y.softmax(1)


def _reader_of(other: FoundExit, one: FoundExit) -> Operation | None:
    """Return the operation by which one exit depends on what another says, if there is one."""
    results = [other.value] + ([other.chain.logits] if isinstance(other.chain, HeadChain) else [])
    for value in (each for logits in results for each in same_elements(logits, backwards=False)):
        if value.made_by is not None and value.made_by in one.needs:
            readers = [each for each in one.needs if value in each.reads]
            return min(readers, key=lambda each: each.number, default=value.made_by)
    return None


def refuse_if_off(outputs: list[Tensor], exact: list[Tensor], allowed: float, what_is: str) -> None:
    """Raise ``ValueError`` if what a network says is off from the truth by more than rounding."""
    error = relative_error(outputs, exact)
    if not error <= allowed:
        raise ValueError(
            f"model: {what_is} off by {error:.2g} of the largest value, {allowed:.2g} being allowed, for a batch of "
            f"{len(exact[0])}; wants exits that compute the same each time, for batches of all sizes{BY_HAND}"
        )
