"""Temperatures, scores and thresholds of exits, how far confidences are from the truth, and a path of candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import CRITERIA, decide_in_order
from ...kernels.reference.merge import first_exit

#: The smallest and the largest temperature.
LEAST_HEAT = 0.01
MOST_HEAT = 100.0
#: Bins of confidence, of equal width, as Guo et al. have them.
BINS = 15
#: Halvings of the search: the logarithm of a temperature is then known to 1e-11.
_HALVINGS = 40


@dataclass(frozen=True)
class Reliability:
    """How often an exit is right when it says that it is so sure: a number for each of ``BINS`` bins of confidence."""

    samples: list[int]
    confidence: list[float | None]
    """Mean confidence of the bin's samples; None where there are none."""
    accuracy: list[float | None]
    """The share of them that the exit gets right."""
    ece: float
    """Expected calibration error: the mean of |accuracy - confidence| over the samples, 0 to 1."""


def fit_temperatures(logits: Tensor, labels: Tensor) -> Tensor:
    """Fit for each exit the temperature under which the labels are likeliest (Guo et al., ICML 2017, section 4.2).

    A small split of which an exit gets every sample right has no likeliest temperature, and one near 0 would round
    confidences to 1. So labels count as not quite certain, as Platt has them (Advances in Large Margin Classifiers,
    1999): of M labels, 1 / (M + 2) goes to all classes alike.

    The negative log-likelihood is convex in 1 / temperature, so that halving an interval finds where its slope, the
    mean logit under the probabilities less that under the labels, is 0; between ``LEAST_HEAT`` and ``MOST_HEAT``.

    Args:
        logits: [E, M, K] float, finite.
        labels: [M] int64.

    Returns:
        [E] float64.
    """
    logits = logits.double()
    doubt = 1 / (len(labels) + 2)
    of_labels = logits.gather(2, labels.expand(len(logits), -1)[..., None])[..., 0].mean(1)
    own = (1 - doubt) * of_labels + doubt * logits.mean((1, 2))  # [E]
    low = torch.full_like(own, LEAST_HEAT).log()
    high = torch.full_like(own, MOST_HEAT).log()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        probs = (logits / middle.exp()[:, None, None]).softmax(2)
        too_cold = (probs * logits).sum(2).mean(1) > own  # surer than the labels allow
        low, high = torch.where(too_cold, middle, low), torch.where(too_cold, high, middle)
    return ((low + high) / 2).exp()


def reliability(confidence: Tensor, correct: Tensor) -> Reliability:
    """Sort answers into bins of confidence.

    Args:
        confidence: [M] probabilities of the answers, 0 to 1.
        correct: [M] bool, true where an answer is right.
    """
    bins = (confidence.double() * BINS).ceil().clamp(1, BINS).long() - 1  # open below, closed above

    def sums(values: Tensor) -> Tensor:
        return torch.bincount(bins, values.double(), minlength=BINS)

    samples, sure, right = sums(torch.ones_like(bins)), sums(confidence), sums(correct)

    def means(total: Tensor) -> list[float | None]:
        return [one / count if count else None for one, count in zip(total.tolist(), samples.tolist(), strict=True)]

    ece = ((right - sure).abs().sum() / len(confidence)).item()
    return Reliability([int(count) for count in samples.tolist()], means(sure), means(right), ece)


def check_number(name: str, value: object, least: float, most: float, wants: str) -> None:
    """Raise ``TypeError`` unless an argument is a number, and ``ValueError`` unless it is from least to most."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {value!r}, wants a number")
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}, wants {wants}")


def exit_scores(logits: Tensor, criteria: Sequence[str], temperatures: Sequence[float]) -> Tensor:
    """Return the scores that E heads compare with their thresholds; a sample exits where score > threshold.

    Args:
        logits: [E, M, K] float32, of the heads in the order in which they run.
        criteria: of each head.
        temperatures: of each head, a divisor of its logits.

    Returns:
        [E, M] float32, each head's within ``auxhead.kernels.CRITERIA[criterion]``; NaN, which never exits, is its lower
        end.
    """
    ranges = [CRITERIA[criterion].range for criterion in criteria]
    rules = [
        (temperature, high, criterion)
        for temperature, (_, high), criterion in zip(temperatures, ranges, criteria, strict=True)
    ]
    scores = [
        output.confidence.nan_to_num(nan=low).clamp(low, high)
        for output, (low, high) in zip(decide_in_order(logits, rules), ranges, strict=True)
    ]
    return torch.stack(scores)


def scores_of(values: Sequence[float]) -> Tensor:
    """Return numbers as the float32 that heads compare, on the CPU, whatever the defaults are."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def exit_indices(confidence: Tensor, thresholds: Tensor) -> Tensor:
    """Return the exit index of each sample, [M] int64: the first head with score > threshold, else E."""
    return first_exit(torch.cat([confidence > thresholds[:, None], torch.ones_like(confidence[:1], dtype=torch.bool)]))


def thresholds_at_error_rate(
    scores: Tensor, correct: Tensor, error_rate: float, ranges: Sequence[tuple[float, float]]
) -> Tensor:
    """Return the smallest thresholds [E] above which each head's error rate is low enough.

    Args:
        scores: [E, M] float32, larger is surer; no NaN.
        correct: [E, M] bool, or more rows, which are passed over.
        error_rate: 0 to 1. A head's rate of being right is counted as (right + 1) / (samples + 2): a handful of
            samples that are right by luck proves little.
        ranges: of each head the range of its scores; the upper end, above which none is, never exits.
    """
    thresholds = scores_of([high for _, high in ranges])
    samples = torch.arange(1, scores.shape[1] + 1, dtype=torch.float64, device="cpu")  # [M], surer than each cut
    for head, unsorted in enumerate(scores):
        low = unsorted.new_tensor([ranges[head][0]])
        sure, order = unsorted.sort(descending=True, stable=True)
        right = correct[head, order].double().cumsum(0)
        enough = (right + 1) / (samples + 2) >= 1.0 - error_rate
        cuts = (enough & (sure > torch.cat([sure[1:], low]))).nonzero()  # equals leave together
        if len(cuts):
            thresholds[head] = threshold_behind(sure, int(cuts[-1]) + 1, float(low))
    return thresholds


def threshold_behind(falling: Tensor, leaving: int, least: float) -> Tensor:
    """Return a threshold that lets the first so many of falling scores exit, half-way to the next one."""
    leaves = falling[leaving - 1]
    if leaving == len(falling):
        return torch.nextafter(leaves, torch.full_like(leaves, least))
    middle = ((falling[leaving].double() + leaves.double()) / 2).float()
    return middle if middle < leaves else falling[leaving]


#: Rates of lost samples, alike for all heads, that the path goes through, up to all of them.
_RATES = 64
_LOWEST_RATE = 1e-3
#: Steps in which the path comes to the lowest rate that a head can show: a small split has no sample wrong there.
_STEPS = 24


def threshold_path(
    scores: Tensor, correct: Tensor, ranges: Sequence[tuple[float, float]], enabled: Sequence[bool]
) -> list[Tensor]:
    """Return threshold vectors in a fixed order, from no exit at all to everyone at the first enabled head.

    For a rate, each head takes the smallest threshold above which it loses at most such a share of the samples: those
    that the classifier is right about and it is not; see :func:`thresholds_at_error_rate`. Before the lowest rate that
    lets anybody go there are stricter candidates, under which each head lets its surest 1/24, 2/24, ... of those go.
    From one candidate to the next no sample leaves later.

    Args:
        scores: [E, M] float32.
        correct: [E + 1, M] bool; the last row is the classifier's.
        ranges: of each head the range of its scores.
        enabled: False for a head that is to let nobody go.

    Returns:
        Vectors [E] float32, all different.
    """
    never = scores_of([high for _, high in ranges])
    kept = correct[:-1] | ~correct[-1]
    opens = torch.tensor(enabled, device="cpu")
    path = [never]
    for number in range(_RATES):
        rate = _LOWEST_RATE ** (1 - number / (_RATES - 1))
        loosest = torch.where(opens, thresholds_at_error_rate(scores, kept, rate, ranges), never)
        for thresholds in [*_stricter(scores, loosest, never), loosest] if len(path) == 1 else [loosest]:
            if not torch.equal(thresholds, path[-1]):
                path.append(thresholds)
    return path


def _stricter(scores: Tensor, thresholds: Tensor, never: Tensor) -> list[Tensor]:
    """Return thresholds that let growing shares of those go that leave under ``thresholds``, all less than 1."""
    falling = scores.sort(1, descending=True).values
    leaving = (scores > thresholds[:, None]).sum(1).tolist()
    steps = []
    for step in range(1, _STEPS):
        found = never.clone()
        for head, count in enumerate(leaving):
            surest = count * step // _STEPS
            if surest:
                surer = int((falling[head] > falling[head, surest]).sum())  # equals stay together
                if surer:
                    found[head] = threshold_behind(falling[head], surer, -math.inf)
        steps.append(found)
    return steps
