"""A bound on the accuracy drop that holds with a given confidence, whatever the distribution of the samples.

Of M samples, ``lost`` are those that the classifier gets right and early exit gets wrong. On samples that were not used
to make the thresholds, being lost is a coin with an unknown rate, and that rate is at least the drop of accuracy: what
early exit wins back, where a head alone is right, is not counted. If the rate were above a budget, so few lost samples
as there are would come up with at most the probability of a binomial tail, which is the p-value here.

Of several candidates, from the strictest on, each is tested in turn until one fails (fixed-sequence testing in "Learn
then Test", Angelopoulos et al., 2021, arXiv:2110.01052): the probability that any that passed exceeds the budget is at
most 1 - confidence. Assumed are exchangeable samples, those of later use included, and candidates and their order that
were fixed before these samples were looked at.
"""

import math
from collections.abc import Sequence

#: Halvings of searches in [0, 1].
_HALVINGS = 60


def p_value(lost: int, samples: int, budget: float) -> float:
    """Return the probability of at most ``lost`` of ``samples`` under a rate of ``budget``, 0 to 1."""
    if budget <= 0.0:
        return 1.0
    if budget >= 1.0:
        return float(lost >= samples)
    terms = [
        math.lgamma(samples + 1)
        - math.lgamma(count + 1)
        - math.lgamma(samples - count + 1)
        + count * math.log(budget)
        + (samples - count) * math.log1p(-budget)
        for count in range(min(lost, samples) + 1)
    ]
    most = max(terms)
    return min(1.0, math.exp(most) * math.fsum(math.exp(term - most) for term in terms))


def holding(lost: Sequence[int], samples: int, budget: float, confidence: float) -> int:
    """Return how many candidates, from the first on, drop accuracy by at most ``budget``, all with ``confidence``.

    Args:
        lost: of each candidate, in an order fixed on other samples.
        samples: of the split that they were counted on.
        budget: of accuracy, 0 to 1.
        confidence: 0.9 is wrong for at most one split in ten.
    """
    for count, one in enumerate(lost):
        if p_value(one, samples, budget) > 1.0 - confidence:
            return count
    return len(lost)


def smallest_budget(lost: int, samples: int, confidence: float) -> float:
    """Return the smallest budget that one candidate, fixed on other samples, holds (Clopper and Pearson, 1934)."""
    if lost >= samples:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if p_value(lost, samples, middle) <= 1.0 - confidence else (middle, high)
    return high


def samples_needed(budget: float, confidence: float) -> int | None:
    """Return how many samples it takes, of which none is lost, to hold a budget; None if no number does."""
    if budget <= 0.0:
        return None
    return 1 if budget >= 1.0 else math.ceil(math.log1p(-confidence) / math.log1p(-budget))
