"""Losses of all exits at once: cross-entropies with a weight an exit, and self-distillation from the last exit."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..listening.reading import parts_in_words


def joint_loss(exits: Sequence[Tensor], labels: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Return the weighted mean of the exits' cross-entropies: deep supervision (Lee et al. 2015, BranchyNet 2016).

    Args:
        exits: logits [N, K] of each exit, as :meth:`EarlyExitNetwork.logits` returns them.
        labels: [N] int64.
        weights: one an exit, from 0; divided by their sum. None weighs all the same.

    Returns:
        A scalar in nats, float32, of float64 logits float64.

    Raises:
        ValueError: weights that are not one an exit, or not numbers from 0 with a positive one among them.
        TypeError: exits that are no logits.
    """
    losses = torch.stack([F.cross_entropy(_wide(logits), labels) for logits in exits])
    return _weighted_mean(losses, weights)


def distillation_loss(
    exits: Sequence[Tensor],
    labels: Tensor,
    weights: Sequence[float] | None = None,
    *,
    temperature: float = 3.0,
    teacher_share: float = 0.5,
) -> Tensor:
    """Return the loss of self-distillation: each head learns from the labels and from the last exit.

    Of a head it is (1 - s) CE(z, labels) + s T^2 KL(softmax(z_last / T) || softmax(z / T)), of the last exit its
    cross-entropy alone; no gradient flows into the teacher. That is the loss of "Be Your Own Teacher" (Zhang et al.,
    ICCV 2019) without its hint on feature maps, and of Phuong & Lampert (ICCV 2019) with a fixed temperature; the
    factor T^2 keeps the gradients' size (Hinton et al. 2015).

    Args:
        exits: logits [N, K] of each exit, the teacher's last; at least two.
        labels: [N] int64.
        weights: as in :func:`joint_loss`.
        temperature: T.
        teacher_share: s, from 0 to 1.

    Returns:
        A scalar in nats, float32, of float64 logits float64.

    Raises:
        ValueError, TypeError: as :func:`joint_loss`.
    """
    teacher = F.log_softmax(_wide(exits[-1].detach()) / temperature, dim=1)
    losses = []
    for logits in exits[:-1]:
        student = F.log_softmax(_wide(logits) / temperature, dim=1)
        divergence = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        by_labels = F.cross_entropy(_wide(logits), labels)
        losses.append((1.0 - teacher_share) * by_labels + teacher_share * temperature**2 * divergence)
    losses.append(F.cross_entropy(_wide(exits[-1]), labels))
    return _weighted_mean(torch.stack(losses), weights)


def check_weights(weights: Sequence[float], exits: int) -> None:
    """Raise ``ValueError`` unless there is a weight for each exit, none below 0 and not all 0."""
    sound = all(0.0 <= weight < math.inf for weight in weights) and sum(weights) > 0
    if len(weights) != exits or not sound:
        raise ValueError(
            f"weights: got {list(weights)}, wants {exits}, one an exit, numbers from 0 with a positive one among them"
        )


def _wide(logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        got = parts_in_words(logits)
        raise TypeError(f"exits: got {got}, wants logits [N, K] of each exit: network.logits(x), not network(x)")
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _weighted_mean(losses: Tensor, weights: Sequence[float] | None) -> Tensor:
    if weights is None:
        return losses.mean()
    check_weights(weights, len(losses))
    total = sum(weights)
    parts = [losses[index] * (weight / total) for index, weight in enumerate(weights)]  # no copy to the device
    return torch.stack(parts).sum()
