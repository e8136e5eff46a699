"""What was best at one batch size, measured at the next ones: batches in between may then take it."""

from collections.abc import Iterable
from itertools import pairwise

from .measurer import ALONE, NETWORK
from .sweep import Tuning


def exchange_winners(tunings: Iterable[Tuning]) -> None:
    """Measure the winner of each batch size at the next smaller and the next larger one, alone and in situ.

    That is done again while it changes who wins, so that in the end every winner was measured there, unless the rules
    of the space exclude it.

    Args:
        tunings: that were run; of heads that differ in the batch size alone those are next to each other that no other
            one lies between.
    """
    heads: dict[tuple[object, ...], list[Tuning]] = {}
    for tuning in tunings:
        target = tuning.target
        heads.setdefault((target.model, target.taps, *target.shape[1:]), []).append(tuning)
    exchanges = [
        (here, there)
        for sizes in heads.values()
        for pair in pairwise(sorted(sizes, key=lambda tuning: tuning.target.shape.samples))
        for here, there in (pair, pair[::-1])
    ]
    while any([_take(here, there, place) for here, there in exchanges for place in (ALONE, NETWORK)]):
        pass


def _take(here: Tuning, there: Tuning, place: str) -> bool:
    """Measure here what wins there; return whether that was new."""
    winner = there.winner(place)
    return winner is not None and here.also(place, winner)
