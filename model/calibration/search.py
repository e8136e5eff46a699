"""The choice among candidates under a budget, with a bound on the accuracy drop that holds with a given confidence.

Of M samples, ``lost`` are those that the classifier gets right and early exit gets wrong. On samples that were not used
to make the thresholds, being lost is a coin with an unknown rate, and that rate is at least the drop of accuracy: what
early exit wins back, where a head alone is right, is not counted. If the rate were above a budget, so few lost samples
as there are would come up with at most the probability of a binomial tail, which is the p-value here.

A sample that no later exit gets right (``CalibratedExit.never_right``) is never lost, wherever it leaves: the
classifier is one of the later exits. So such samples count against no budget of accuracy, nor against a head where
candidates are made (``thresholds.threshold_path``), and there is nothing to ask for.

Of several candidates, from the strictest on, each is tested in turn until one fails (fixed-sequence testing in "Learn
then Test", Angelopoulos et al., 2021, arXiv:2110.01052): the probability that any that passed exceeds the budget is at
most 1 - confidence. Assumed are exchangeable samples, those of later use included, and candidates and their order that
were fixed before these samples were looked at. Nothing is assumed of the distribution of the samples.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import and_
from typing import NamedTuple

import torch
from torch import Tensor

from .exit_latency import ExitLatencies, expected_latency
from .report import Bound, CurvePoint, reported
from .thresholds import check_number, exit_indices

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


class Budget(NamedTuple):
    """The one budget of a calibration."""

    name: str
    """``max_accuracy_drop``, ``max_latency_ms`` or ``max_work``, as the argument of :func:`calibrate_network`."""
    value: float


def one_budget(
    max_accuracy_drop: float | None,
    max_latency_ms: float | None,
    max_work: float | None,
    latencies: ExitLatencies | None,
) -> Budget:
    """Return the budget that is given, of :func:`calibrate_network`; ``TypeError``, ``ValueError`` if it cannot be."""
    budgets = {"max_accuracy_drop": max_accuracy_drop, "max_latency_ms": max_latency_ms, "max_work": max_work}
    given = [Budget(name, value) for name, value in budgets.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(name for name, _ in given) or "none"
        raise ValueError(f"{', '.join(budgets)}: got {got}, wants one of them")
    name, value = given[0]
    least, most, wants = {
        "max_accuracy_drop": (0.0, 1.0, "a number in [0, 1]"),
        "max_latency_ms": (math.ulp(0.0), sys.float_info.max, "milliseconds greater than 0"),
        "max_work": (math.ulp(0.0), 1.0, "a share of the backbone's FLOPs in (0, 1]"),
    }[name]
    check_number(name, value, least, most, wants)
    if name == "max_latency_ms" and latencies is None:
        raise ValueError("latencies: got None, wants those of measure_exit_latencies for max_latency_ms")
    return Budget(name, float(value))


class ScoredSamples(NamedTuple):
    """The samples of one split, under the temperatures."""

    scores: Tensor
    """[E, M] float32, of the heads."""
    correct: Tensor
    """[E + 1, M] bool, of heads and classifier."""

    def right(self, exits: Tensor) -> Tensor:
        """Return whether early exit is right, [M] bool, given the exit index of each sample."""
        return self.correct.gather(0, exits[None])[0]


class Choice(NamedTuple):
    """The chosen candidate, by its index, and what is promised of it."""

    candidate: int
    bound: Bound


def curve_of(
    path: Sequence[Tensor],
    samples: ScoredSamples,
    never: Sequence[float],
    work: Sequence[float],
    latencies: ExitLatencies | None,
) -> list[CurvePoint]:
    """Return what each candidate of a path, thresholds [E], does to the samples of a split.

    ``never`` has of each head the threshold that never exits, ``work`` the share of the backbone's at each exit.
    """
    curve = []
    for thresholds in path:
        exits = exit_indices(samples.scores, thresholds)
        right = samples.right(exits)
        shares = torch.bincount(exits, minlength=len(samples.correct)) / len(exits)
        curve.append(
            CurvePoint(
                thresholds=[reported(*one) for one in zip(thresholds.tolist(), never, strict=True)],
                lost=int((samples.correct[-1] & ~right).sum()),
                p_value=None,
                holds=None,
                accuracy=right.double().mean().item(),
                shares=shares.tolist(),
                mean_exit=exits.double().mean().item(),
                work=expected_work(exits, work),
                latency_ms=None if latencies is None else expected_latency(exits, latencies),
            )
        )
    return curve


def expected_work(exits: Tensor, work: Sequence[float]) -> float:
    """Return the mean work of samples, given the exit index [M] int64 of each, and the work at each exit."""
    shares = torch.bincount(exits, minlength=len(work)).double() / len(exits)  # exact where all leave at one exit
    return (shares @ torch.tensor(work, dtype=torch.float64, device="cpu")).item()


def judged(curve: Sequence[CurvePoint], samples: int, budget: float, confidence: float) -> list[CurvePoint]:
    """Return the curve with the test of each candidate, in an order that was fixed on other samples than these.

    Those hold that drop accuracy by at most ``budget``, as do all before them, all with ``confidence``. The first,
    under which nobody leaves, needs no test.
    """
    found = [0.0, *(p_value(point.lost, samples, budget) for point in curve[1:])]
    holds = accumulate((one <= 1.0 - confidence for one in found), and_)
    return [replace(point, p_value=p, holds=held) for point, p, held in zip(curve, found, holds, strict=True)]


def within_accuracy(
    curve: Sequence[CurvePoint], samples: int, budget: float, confidence: float, *, known: bool = True
) -> Choice:
    """Choose the last candidate that holds an accuracy budget; ``curve`` is that of :func:`judged`.

    What other budget would hold is said if it is known that the network has not learned from these samples.
    """
    index = sum(bool(point.holds) for point in curve) - 1
    lost = curve[index].lost
    if index or len(curve) == 1:
        reason = None if index else "no head is enabled that is sure of any sample; nobody leaves early"
        return Choice(index, Bound(confidence, budget if index else 0.0, bool(index), reason, samples, lost))
    needed, first = samples_needed(budget, confidence), curve[1]
    if needed is not None and samples < needed:
        more = f"it takes {needed:,} samples for thresholds if none of them is lost"
    else:
        more = f"the strictest thresholds lose {first.lost:,} of them"
    reason = f"a drop of at most {budget:.3%} cannot be shown with {samples:,} samples: {more}"
    if known:
        shown = smallest_budget(first.lost, samples, confidence)
        reason += f". With {confidence:.0%} confidence they would show {shown:.3%} for thresholds under which "
        reason += f"{1 - first.shares[-1]:.1%} leave early; now nobody does"
    return Choice(0, Bound(confidence, 0.0, False, reason, samples, 0))


def within_cost(
    curve: Sequence[CurvePoint], expected: Sequence[float], samples: int, budget: float, confidence: float, unit: str
) -> Choice:
    """Choose the strictest candidate that meets a budget of time or work, or the cheapest if none does.

    Args:
        curve: on the split for thresholds, which only bounds what the choice costs in accuracy.
        expected: mean cost of each candidate on samples of another split: with them it is chosen.
        samples: of the split for thresholds.
        budget: what the mean may be.
        confidence: of the bound.
        unit: puts a cost into words, as a format: "{:.4g} ms".
    """
    cheapest = min(range(len(curve)), key=expected.__getitem__)
    reachable = expected[cheapest] <= budget
    index = next(index for index, one in enumerate(expected) if one <= budget) if reachable else cheapest
    lost = curve[index].lost
    drop = smallest_budget(lost, samples, confidence) if index else 0.0
    reason = None
    if not reachable:
        least, most = unit.format(expected[cheapest]), unit.format(budget)
        reason = f"the cheapest thresholds take {least} on average, more than {most}; they are set"
    return Choice(index, Bound(confidence, drop, reachable, reason, samples, lost))
