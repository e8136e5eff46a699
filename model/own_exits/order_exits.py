"""``order_exits``: the exits of a model from the shallowest to the deepest, which is its classifier."""

from collections.abc import Iterable
from typing import Any

from ..listening.recording import Operation
from .find_exits import FoundExit, Mode
from .head_chain import HeadChain


def order_exits(mode: Mode, final: Any) -> list[FoundExit]:
    """Return the exits by how deep in the backbone their branches leave it, the classifier last.

    What two exits share at most ends where two branches at least leave it: a head, and the rest of the backbone with
    its classifier. Which of them is the classifier is told where all others are heads that can be fused, and it has
    layers of maps or tokens. Else the order in which exits are returned decides, if that agrees with the work that
    the branches do on those. Where none of them has any, and an exit returned behind them does more of that work, they
    are heads that share layers of their own.

    Args:
        mode: the model in eval mode.
        final: the place of the classifier, if its owner has said it.

    Raises:
        ValueError: nothing decides; names the exits that it may be.
    """
    exits = mode.exits
    pairs = [(one, one.needs & other.needs) for one in exits for other in exits if other is not one]
    deepest = max((both for _, both in pairs), key=_work)
    last = _final(
        mode, deepest, [one for one in exits if any(each is one and both == deepest for each, both in pairs)], final
    )
    return [*sorted((one for one in exits if one is not last), key=lambda one: _depth(one, last, mode)), last]


def _final(mode: Mode, deepest: set[Operation], tied: list[FoundExit], final: Any) -> FoundExit:
    exits = mode.exits
    if final is not None:
        named = [one for one in exits if one.place.name == final]
        if not named:
            raise ValueError(f"final: got {final!r}, wants one of {[one.place.name for one in exits]}")
        return named[0]
    rest = [one for one in tied if not _is_head_of_shared(one)]
    work = [_flops_on_maps(one.branch, mode) for one in tied]
    costliest = [one for one, its in zip(tied, work, strict=True) if its == max(work)]
    returned = _at_an_end(exits, deepest)
    in_all = [_flops_on_maps(one.needs, mode) for one in exits]
    beside = [one for one, its in zip(exits, in_all, strict=True) if its == max(in_all) and one not in tied]
    goes_on = any(_flops_on_maps(one.branch, mode) for one in exits if one not in tied)
    if not max(work) and beside == [exits[-1]]:  # the others are heads that share layers of their own
        return exits[-1]
    if exits[-1] not in beside and (max(work) or not goes_on or exits[-1] in tied and not beside):
        if len(rest) == 1 and rest == costliest and max(work) and (rest[0] in returned or not returned):
            return rest[0]
        alone = [one for one in tied if len(one.place.path) < max(len(other.place.path) for other in exits)]
        for said in (*returned[:1], *(alone if len(alone) == 1 else [])):
            if said in costliest:
                return said
    likely = (returned if len(returned) == 1 else costliest)[0].place.name
    named = [*tied, *beside, *([exits[-1]] if goes_on else [])]
    names = [one.place.name for one in exits if one in named]
    raise ValueError(
        f"model: any of its exits {', '.join(map(repr, names))} may be its classifier, the one that answers last: "
        f"where their branches leave the backbone, and the order in which they are returned, do not agree with the "
        f"work that they do; wants final={likely!r}, or another of them"
    )


def _at_an_end(exits: list[FoundExit], deepest: set[Operation]) -> list[FoundExit]:
    """Return the exits that the order of return allows as the classifier: last behind all, or first before others."""
    depths = [_work(one.needs & deepest) for one in exits]
    found = [exits[-1]] if depths == sorted(depths) else []
    if depths[0] == max(depths) and depths[1:] in (sorted(depths[1:]), sorted(depths[1:], reverse=True)):
        found.append(exits[0])
    return found


def _is_head_of_shared(one: FoundExit) -> bool:
    """Return whether all between the last shared value and an exit is a head that can be fused."""
    return isinstance(one.chain, HeadChain) and all(value.made_by not in one.branch for value in one.chain.reads)


def _flops_on_maps(operations: Iterable[Operation], mode: Mode) -> int:
    """Return the work on maps or tokens: in a branch, of more of the backbone or of a head that works as one."""
    rows = mode.recording.samples
    on_maps = (
        each
        for each in operations
        if any(read.from_input and (len(read.shape) > 2 or read.shape[:1] != (rows,)) for read in each.reads)
    )
    return _work(on_maps)[0]


def _depth(one: FoundExit, last: FoundExit, mode: Mode) -> tuple[int, ...]:
    made = [value.made_by.number for value in one.frontier if value.made_by is not None]
    return (*_work(one.needs & last.needs), *_work(one.shared), max(made, default=-1), mode.exits.index(one))


def _work(operations: Iterable[Operation]) -> tuple[int, int]:
    """Return the FLOPs of some operations, and how many there are."""
    flops = [each.flops for each in operations]
    return sum(flops), len(flops)
