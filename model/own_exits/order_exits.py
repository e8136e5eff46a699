"""``order_exits``: the exits of a model from the shallowest to the deepest, which is its classifier."""

from typing import Any

from .find_exits import FoundExit, Mode
from .head_chain import HeadChain


def order_exits(mode: Mode, final: Any) -> list[FoundExit]:
    """Return the exits by how deep in the backbone their branches leave it, the classifier last.

    The last shared value has two branches at least: a head, and the rest of the backbone with its classifier. Which of
    them is the classifier is told where all others are heads that can be fused, and it has layers of maps or tokens.
    Else the order in which exits are returned decides, if that agrees with the work that the branches do.

    Args:
        mode: the model in eval mode.
        final: the place of the classifier, if its owner has said it.

    Raises:
        ValueError: nothing decides; names the exits that it may be.
    """
    exits = mode.exits
    deepest = max(exits, key=lambda one: (_flops(one.shared), len(one.shared)))
    tied = [one for one in exits if one.shared == deepest.shared]
    last = _final(exits, tied, final)
    return [*sorted((one for one in exits if one is not last), key=lambda one: _depth(one, mode)), last]


def _final(exits: list[FoundExit], tied: list[FoundExit], final: Any) -> FoundExit:
    names = [one.place.name for one in tied]
    if final is not None:
        named = [one for one in tied if one.place.name == final]
        if not named:
            raise ValueError(f"final: got {final!r}, wants one of {names}, the deepest exits of the model")
        return named[0]
    rest = [one for one in tied if not _is_head_of_shared(one)]
    if len(tied) == 1 or len(rest) == 1 and _works_on_maps(rest[0]):
        return (rest or tied)[0]
    most = max(_flops(one.branch) for one in tied)
    costliest = [one for one in tied if _flops(one.branch) == most]
    alone = [one for one in tied if len(one.place.path) < max(len(other.place.path) for other in exits)]
    for said in (_last_returned(exits, tied), *(alone if len(alone) == 1 else [])):
        if said in costliest:
            return said
    raise ValueError(
        f"model: any of its exits {', '.join(map(repr, names))} may be its classifier, the one that answers last: "
        f"their branches leave the backbone at the same place, and the order in which they are returned does not agree "
        f"with the work that they do; wants final={costliest[0].place.name!r}, or another of them"
    )


def _last_returned(exits: list[FoundExit], tied: list[FoundExit]) -> FoundExit | None:
    """Return the one of the deepest exits that is returned at the end where they are; None if that is neither."""
    places = [(exits.index(one), _flops(one.shared), len(one.shared)) for one in exits if one not in tied]
    deep = [exits.index(one) for one in tied]
    depths = [depth for _, *depth in places]
    if all(place < min(deep) for place, *_ in places) and depths == sorted(depths):
        return exits[max(deep)]
    if all(place > max(deep) for place, *_ in places) and depths == sorted(depths, reverse=True):
        return exits[min(deep)]
    return None


def _is_head_of_shared(one: FoundExit) -> bool:
    """Return whether all between the last shared value and an exit is a head that can be fused."""
    return isinstance(one.chain, HeadChain) and all(value.made_by not in one.branch for value in one.chain.reads)


def _works_on_maps(one: FoundExit) -> bool:
    """Return whether layers of maps or tokens run in a branch: more of the backbone, or a head that works as one."""
    return any(each.flops and len(each.reads[0].shape) > 2 for each in one.branch)


def _depth(one: FoundExit, mode: Mode) -> tuple[int, ...]:
    made = [value.made_by.number for value in one.frontier if value.made_by is not None]
    return (_flops(one.shared), len(one.shared), max(made, default=-1), mode.exits.index(one))


def _flops(operations: Any) -> int:
    return sum(each.flops for each in operations)
