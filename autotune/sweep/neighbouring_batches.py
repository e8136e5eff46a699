"""Winners of one batch size, measured at the next ones: batches in between may then take them."""

from collections.abc import Iterable, Sequence

from ...kernels.launch_config import LaunchConfig
from ..measuring.targets import ALONE, NETWORK
from .measure import Tuning


def measure_winners_at_neighbours(tunings: Iterable[Tuning]) -> None:
    """Measure the winner of each batch size at the next smaller and the next larger one, alone and in situ.

    In situ also the winner alone, since the winner in situ is compared with it; where that looks slower, all candidates
    are measured again. Repeated until no winner changes, so that in the end every winner was measured at its
    neighbours, the next sizes among ``tunings``, unless the rules of the space exclude it.
    """
    heads: dict[tuple[object, ...], list[Tuning]] = {}
    for tuning in tunings:
        target = tuning.target
        heads.setdefault((target.model, target.taps, *target.shape[1:]), []).append(tuning)
    beside: list[tuple[Tuning, list[Tuning]]] = []
    for sizes in heads.values():
        sizes.sort(key=lambda tuning: tuning.target.shape.samples)
        beside += [(here, sizes[max(at - 1, 0) : at] + sizes[at + 1 : at + 2]) for at, here in enumerate(sizes)]
    new = True
    while new:
        wanted = [(here, others, place) for here, others in beside for place in (ALONE, NETWORK)]
        for here, others, place in wanted:  # one is measured while others are compiled
            here.compile_candidates(place, _winners(here, others, place))
        new = any([here.add_candidates(place, _winners(here, others, place)) for here, others, place in wanted]) or any(
            [here.remeasure_if_in_doubt() for here, _ in beside]
        )


def _winners(here: Tuning, others: Sequence[Tuning], place: str) -> list[LaunchConfig | None]:
    """Return what is to be measured here: the winners there, and in situ also the winner alone here."""
    found = [other.decision(place).winner for other in others]
    return found if place == ALONE else [*found, here.decision(ALONE).winner]
