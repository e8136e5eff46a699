"""``place_taps``: picks, of the layers that may carry a head, those that return nearest to given shares of the work."""

from collections.abc import Sequence

from .main_path import Cut

#: Shares of the model's work behind which heads are placed.
TARGETS = (0.25, 0.5, 0.75)
#: A block or stage this near to a target is taken before a layer inside of one that is nearer.
_NEAR = 0.1
#: Less work than this between two heads is not worth the second.
_APART = 0.1
#: A head that comes later saves next to nothing.
_LATEST = 0.95


def place_taps(cuts: Sequence[Cut]) -> list[Cut]:
    """Return a cut for each target, in order; fewer where those of two targets are next to each other.

    Args:
        cuts: of the model, their work as it was counted or measured.
    """
    usable = [cut for cut in cuts if 0.0 < cut.work <= _LATEST]
    chosen: list[Cut] = []
    for target in TARGETS if usable else ():
        nearest = min(abs(cut.work - target) for cut in usable)
        near = [cut for cut in usable if abs(cut.work - target) <= max(_NEAR, nearest + _NEAR / 4)]
        best = min(near, key=lambda cut: (cut.name.count("."), abs(cut.work - target)))
        if all(best.work - other.work > _APART for other in chosen):
            chosen.append(best)
    return chosen
