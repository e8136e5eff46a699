"""``place_taps``: picks, of the layers that may carry a head, those that return nearest to given shares of the work."""

from collections.abc import Mapping, Sequence

#: Shares of the model's work behind which heads are placed.
TARGETS = (0.25, 0.5, 0.75)
#: A block or stage this near to a target is taken before a layer inside of one that is nearer.
_NEAR = 0.1
#: Nothing further from a target is taken for it.
_FAR = 0.2
#: Less work than this between two heads is not worth the second.
_APART = 0.1
#: A head that comes later saves next to nothing.
_LATEST = 0.95


def place_taps(cuts: Sequence[str], work: Mapping[str, float]) -> list[str]:
    """Return a layer for each target, in order; fewer where there is none, or those of two are next to each other.

    Args:
        cuts: layers that may carry a head.
        work: done when each of them returns, as it was counted or measured: 0 to 1.
    """
    usable = [name for name in cuts if 0.0 < work[name] <= _LATEST]
    chosen: list[str] = []
    for target in TARGETS if usable else ():
        off = {name: abs(work[name] - target) for name in usable}
        within = max(_NEAR, min(off.values()) + _NEAR / 4)
        # of layers behind the same work the last: an activation or a pool behind a convolution
        near = [(name.count("."), off[name], -place) for place, name in enumerate(usable) if off[name] <= within]
        best = usable[-min(near)[2]]
        if off[best] < _FAR and all(work[best] - work[other] > _APART for other in chosen):
            chosen.append(best)
    return chosen


def missed_targets(shares: Sequence[float]) -> list[float]:
    """Return the shares of the work behind which there should be a head, and none is near."""
    return [target for target in TARGETS if all(abs(share - target) > _NEAR for share in shares)]
