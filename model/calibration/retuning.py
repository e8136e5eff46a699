"""``retune_thresholds``: thresholds for the samples that come now, tuned on what was logged of the last ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ...kernels.criteria import CRITERIA
from .exit_latency import ExitLatencies, expected_latency
from .exit_log import ExitLog, checked
from .thresholds import between, exit_indices

#: Share of the samples by which a head is opened at first, and the smallest step that is tried.
_FIRST_STEP = 0.1
_LAST_STEP = 0.01


class _Tried(NamedTuple):
    shares: list[float]
    """Of the log that each head is open for, by its own scores."""
    thresholds: torch.Tensor
    milliseconds: float
    """Until the last sample of a batch leaves, on average."""
    cost: float
    """These, and until each sample leaves by itself: a batch is done sooner only once all of its samples leave."""
    disagreement: float


def retune_thresholds(
    log: ExitLog, latencies: ExitLatencies, *, max_disagreement: float, max_latency_ms: float | None = None
) -> tuple[float, ...]:
    """Return thresholds under which logged samples would have had their answers soonest.

    The policy is that of Apparate (Dai et al., SOSP 2024): from no exit at all, the head is opened a step further that
    saves most time for what it adds in disagreement with the classifier. Its step doubles; that of a head that would
    disagree too much, or saves nothing, is halved, until all are small. Steps are shares of the logged samples, so that
    any criterion will do; samples of equal scores leave together. Of batches, which take as long as their last sample,
    the time of each sample counts as well: the first steps make no batch faster. If in the end none is, nobody leaves.
    It follows a drift and proves nothing: the bound is that of :func:`calibrate_network`.

    Args:
        log: of the last samples, for all heads, as where every head is computed.
        latencies: of the runner.
        max_disagreement: share of the samples that may get another answer than the classifier's, 0 to 1.
        max_latency_ms: enough; no head is opened further once the mean is at most that. None opens as far as it helps.

    Returns:
        A threshold for each head; the end of the criterion's range never exits.

    Raises:
        TypeError, ValueError: arguments that are none of these or do not fit.
    """
    log = checked(log)
    check_latencies(latencies, len(log.scores))
    for name, value, most in (("max_disagreement", max_disagreement, 1.0), ("max_latency_ms", max_latency_ms, None)):
        if value is None and most is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: got {value!r}, wants a number")
        if not 0.0 <= value <= (float("inf") if most is None else most):
            raise ValueError(f"{name}: got {value}, wants {'0 or more' if most is None else 'a number in [0, 1]'}")
    heads = range(len(log.scores))
    falling = log.scores.sort(1, descending=True).values
    now = nobody = _try(log, falling, [0.0] * len(heads), latencies)
    steps = [_FIRST_STEP] * len(heads)
    while max(steps) >= _LAST_STEP and (max_latency_ms is None or now.milliseconds > max_latency_ms):
        better: dict[int, _Tried] = {}
        for head in heads:
            if steps[head] < _LAST_STEP:
                continue
            shares = [min(1.0, share + steps[head] * (head == one)) for one, share in enumerate(now.shares)]
            tried = _try(log, falling, shares, latencies)
            if tried.disagreement <= max_disagreement and tried.cost < now.cost:
                better[head] = tried
            else:
                steps[head] /= 2
        if better:
            best = max(better, key=lambda head: _worth(now, better[head]))
            now = better[best]
            steps[best] *= 2
    found = now if now.milliseconds < nobody.milliseconds else nobody
    return tuple(found.thresholds.tolist())


def check_latencies(latencies: object, heads: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless latencies are those of a network with so many heads."""
    if not isinstance(latencies, ExitLatencies):
        raise TypeError(f"latencies: got {type(latencies).__name__}, wants those of measure_exit_latencies")
    if len(latencies.milliseconds) != heads + 1:
        raise ValueError(
            f"latencies: are of {len(latencies.milliseconds)} exits, wants {heads + 1}, as the network has"
        )


def _worth(before: _Tried, after: _Tried) -> float:
    """Return the time saved for each sample more that gets another answer."""
    added = max(0.0, after.disagreement - before.disagreement)
    return (before.cost - after.cost) / (added + 1e-6)


def _try(log: ExitLog, falling: torch.Tensor, shares: Sequence[float], latencies: ExitLatencies) -> _Tried:
    """Return what thresholds do that let these shares of the samples go, each head by itself; equals go together."""
    samples = falling.shape[1]
    thresholds, gone = torch.empty(len(falling)), []
    for head, (share, own) in enumerate(zip(shares, falling, strict=True)):
        low, high = CRITERIA[log.criteria[head]].range
        leaving = round(share * samples)
        if leaving:  # with all that are as sure as the last of them, but for those that no threshold lets go
            leaving = min(int((own >= own[leaving - 1]).sum()), int((own > low).sum()))
        if not leaving:
            thresholds[head] = high
        else:
            last = own[leaving - 1]
            below = own[leaving] if leaving < samples else torch.nextafter(last, torch.tensor(low))
            thresholds[head] = between(below, last).clamp(low, high)
        if log.criteria[head] == "patience":
            thresholds[head].floor_()  # scores are whole numbers, and so is the patience of PABEE
        gone.append(leaving / samples)
    exits = exit_indices(log.scores, thresholds)
    milliseconds = expected_latency(exits, latencies)
    cost = milliseconds + expected_latency(exits, replace(latencies, batch_size=1))
    return _Tried(gone, thresholds, milliseconds, cost, log.disagreement(exits))
