"""What was best at one batch size, measured at the next ones: batches in between may then take it."""

from collections.abc import Iterable, Sequence

from .measurer import ALONE, NETWORK
from .sweep import Tuning


def exchange_winners(tunings: Iterable[Tuning]) -> None:
    """Measure the winner of each batch size at the next smaller and the next larger one, alone and in situ.

    And in situ what wins alone by then, since that is compared with the winner in situ. All is done again while it
    changes who wins, so that in the end every winner was measured there, unless the rules of the space exclude it.

    Args:
        tunings: that were run; of heads that differ in the batch size alone those are next to each other that no other
            one lies between.
    """
    heads: dict[tuple[object, ...], list[Tuning]] = {}
    for tuning in tunings:
        target = tuning.target
        heads.setdefault((target.model, target.taps, *target.shape[1:]), []).append(tuning)
    beside: list[tuple[Tuning, list[Tuning]]] = []
    for sizes in heads.values():
        sizes.sort(key=lambda tuning: tuning.target.shape.samples)
        beside += [
            (here, sizes[max(place - 1, 0) : place] + sizes[place + 1 : place + 2]) for place, here in enumerate(sizes)
        ]
    while any([_take(here, others) for here, others in beside]):
        pass


def _take(here: Tuning, others: Sequence[Tuning]) -> bool:
    """Measure here what wins there; return whether anything was new."""
    alone = here.also(ALONE, [other.winner(ALONE) for other in others])
    return here.also(NETWORK, [*(other.winner(NETWORK) for other in others), here.winner(ALONE)]) or alone
