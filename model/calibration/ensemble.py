"""Ensemble of the exits so far: at each exit the weighted mean of log-probabilities of the exits up to it."""

import torch
from torch import Tensor

from .search import p_value

#: Steps of Newton's method; a handful is enough, and none is taken once there is nothing to gain.
_STEPS = 50
#: A weight below this whose slope points to 0 goes there, and has no part in Newton's step.
_NEARLY_NONE = 1e-4


def fit_ensembles(logits: Tensor, labels: Tensor) -> list[list[float]]:
    """Fit for each exit the weights, none below 0, of the exits up to it under which the labels are likeliest.

    The answer is softmax(sum of weight times log-probability): the mean of log-probabilities, of which the sum of the
    weights is a temperature's inverse. The exit alone has weights 0, ..., 0, 1 / temperature. The negative
    log-likelihood is convex in the weights; labels count as not quite certain, as in :func:`fit_temperatures`.

    Args:
        logits: [E + 1, M, K] float, finite.
        labels: [M] int64.

    Returns:
        For each exit one weight more than for the one before.
    """
    log_probs = logits.double().log_softmax(2)
    return [_fit(log_probs[: last + 1], labels).tolist() for last in range(len(log_probs))]


def _fit(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Return weights [E] for exits [E, M, K], by a projected Newton method (Bertsekas, SIAM J. Control, 1982)."""
    exits, samples, _ = log_probs.shape
    doubt = 1 / (samples + 2)
    of_labels = log_probs.gather(2, labels.expand(exits, -1)[..., None])[..., 0].mean(1)
    own = (1 - doubt) * of_labels + doubt * log_probs.mean((1, 2))  # [E]

    def mixed(weights: Tensor) -> Tensor:
        return torch.einsum("e,emk->mk", weights, log_probs)

    def loss(weights: Tensor) -> float:
        return (mixed(weights).logsumexp(1).mean() - weights @ own).item()

    weights = torch.zeros_like(own)  # where no softmax is saturated, and Newton's step knows how far to go
    for _ in range(_STEPS):
        probs = mixed(weights).softmax(1)
        means = torch.einsum("mk,emk->em", probs, log_probs)
        slope = means.mean(1) - own
        free = (weights > _NEARLY_NONE) | (slope < 0)
        spread = ((log_probs - means[..., None]) * probs.sqrt()).flatten(1)
        curvature = (spread @ spread.T / samples)[free][:, free]
        curvature += 1e-9 * torch.eye(len(curvature), dtype=torch.float64, device="cpu")  # exits that say the same
        step = slope.clone()
        step[free] = torch.linalg.solve(curvature, slope[free])
        if slope[free] @ step[free] + slope[~free] @ weights[~free] < 1e-12:  # what is to be gained, twice at most
            break
        size, before = 1.0, loss(weights)
        while size > 1e-6 and loss((weights - size * step).clamp(min=0.0)) >= before:
            size /= 2
        if size <= 1e-6:
            break
        weights = (weights - size * step).clamp(min=0.0)
    return weights


def ensemble_logits(logits: Tensor, weights: list[list[float]]) -> Tensor:
    """Return what ensembles say of logits [E + 1, M, K], as logits of the same shape and of temperature 1.

    A softmax of weighted logits is one of weighted log-probabilities, which differ by a number for each sample.
    """
    said = [
        torch.einsum("e,emk->mk", torch.tensor(own, dtype=logits.dtype, device="cpu"), logits[: len(own)])
        for own in weights
    ]
    return torch.stack(said)


def judge_ensembles(ensembles: Tensor, alone: Tensor) -> tuple[int, int, float]:
    """Return for how many samples more ensembles than exits are right, and fewer, and a sign test's p-value.

    That is of their being no better. ``ensembles`` and ``alone`` are [E + 1, M] bool, of samples that no weight was
    fitted to; a sample counts once, over all exits together.
    """
    gain = ensembles.sum(0) - alone.sum(0)
    better, worse = int((gain > 0).sum()), int((gain < 0).sum())
    return better, worse, p_value(worse, better + worse, 0.5)
