"""How the launches of a captured network can leave its trunk: after which taps, and whether the trunk goes first."""

from collections.abc import Sequence
from typing import NamedTuple

from ...model.runners.overlapped import fork_choices


class NetworkPoint(NamedTuple):
    """One way; with the forks it also says which heads share a launch."""

    forks: tuple[str, ...]
    """Taps after which a launch leaves the trunk, with all heads since the one before; the rest of the heads run with
    the classifier."""
    trunk_first: bool = True
    """Whether the trunk has a higher priority than the launches beside it, or the same."""

    def __str__(self) -> str:
        return f"forks-{'+'.join(self.forks) or 'none'}-priority-{'high' if self.trunk_first else 'same'}"


def network_points(taps: Sequence[str], by_rule: NetworkPoint) -> list[NetworkPoint]:
    """Return what is worth measuring, the one by rule first, then those with few forks.

    No fork; forks after one tap, every other one, and each, up to the last tap that forks by rule, and up to the very
    last; and the trunk's priority, at the forks by rule. No more forks than there are taps, no grouping of heads twice,
    and no priority over nothing: where nothing runs beside the trunk, it is left out.

    Args:
        taps: of the network.
        by_rule: what a runner does unless it is told otherwise.
    """
    lasts = {len(taps) - 1, *(taps.index(fork) for fork in by_rule.forks[-1:])}
    groupings = {(), *(tuple(taps[place] for place in choice) for last in lasts for choice in fork_choices(last))}
    ordered = sorted(groupings, key=lambda forks: (len(forks), [taps.index(fork) for fork in forks]))
    same_priority = [by_rule._replace(trunk_first=False)] if by_rule.forks else []
    return list(dict.fromkeys([by_rule, *map(NetworkPoint, ordered), *same_priority]))
