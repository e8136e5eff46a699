"""``TrainingPlan``, the settings of a training; the learning rate of each step, and the losses of all exits at once."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..basics.arguments import kind_of
from ..listening.reading import parts_in_words

#: What is trained, by the name of the method.
METHODS = ("joint", "heads", "distill")
#: How much each exit's gradient counts, by name.
GRADIENTS = ("equal", "depth")
#: Number formats of the forward pass; parameters and gradients stay as they are in all.
PRECISIONS = ("float32", "bfloat16", "float16")
#: Of each number of a plan the least, the most, and both in words.
_NUMBERS = {
    **dict.fromkeys(("learning_rate", "temperature"), (math.ulp(0.0), sys.float_info.max, "a positive number")),
    "weight_decay": (0.0, sys.float_info.max, "a number from 0"),
    "teacher_share": (0.0, 1.0, "a number from 0 to 1"),
    **dict.fromkeys(("label_smoothing", "ema"), (0.0, math.nextafter(1.0, 0.0), "a number from 0, smaller than 1")),
}


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a training: AdamW (Loshchilov & Hutter 2019), one-cycle schedule (Smith & Topin 2018), or yours.

    Raises:
        ValueError, TypeError: a setting out of its range, or of another type.
    """

    method: str = "joint"
    """``"joint"``: all parameters that require gradients, by the cross-entropies of all exits. ``"heads"``: the heads
    alone, on features of the frozen backbone that are computed once, and with them a linear classifier if that alone of
    the backbone requires gradients, as a new one does. ``"distill"``: as ``"joint"``, and each head also
    learns from the last exit, see :func:`distillation_loss`."""
    epochs: int = 10
    """Passes over the images."""
    learning_rate: float = 1e-3
    """The largest, at the top of the cycle."""
    weight_decay: float = 0.05
    """Of AdamW."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    """Makes one of the parameters that are trained, ``lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9)``, say;
    learning rate and weight decay are its own then. None is AdamW of those above."""
    scheduler: Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler] | None = None
    """Makes one for the optimizer and a number of steps, behind each of which it steps: ``lambda optimizer, steps:
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)``. None is the one-cycle schedule, up to the
    optimizer's own rates."""
    weights: tuple[float, ...] | None = None
    """Of each exit's loss, the classifier's last (of ``"heads"`` if it is trained); None weighs all the same."""
    gradients: str = "equal"
    """``"equal"``: all losses count the same, and an early layer gets the sum of the gradients of all exits behind it.
    ``"depth"``: losses are weighed 1, 2, 3, ... in the order of the exits (PABEE, Zhou et al. 2020, arXiv:2006.04152,
    after Kaya et al. 2019), in place of ``weights``; not with ``"heads"``, whose exits share nothing."""
    temperature: float = 3.0
    """Of ``"distill"``: divides the logits of student and teacher."""
    teacher_share: float = 0.5
    """Of ``"distill"``: the teacher's share of a head's loss, from 0 to 1; the labels have the rest."""
    label_smoothing: float = 0.0
    """The part of each label that all classes share, from 0 (Szegedy et al. 2016)."""
    ema: float | None = None
    """Of a moving average of parameters and buffers, which the network is left with, what each step leaves of it, 0 to
    1 (0.999, say); None leaves it with the parameters themselves."""
    precision: str = "float32"
    """``"float32"``, or ``"bfloat16"`` or ``"float16"`` by autocast; losses of float16 are scaled. A network in float64
    trains in that, under ``"float32"``, which is no autocast."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one step; the rest at the end of an epoch makes a step of its own."""
    patience: int | None = None
    """Epochs in a row without a better mean accuracy of the exits after which training stops; None never stops."""

    def __post_init__(self) -> None:
        for name, wanted in (("method", METHODS), ("gradients", GRADIENTS), ("precision", PRECISIONS)):
            if getattr(self, name) not in wanted:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wants one of {', '.join(map(repr, wanted))}")
        for name in ("epochs", "accumulate", "patience"):
            value = getattr(self, name)
            if not (type(value) is int and value > 0 or name == "patience" and value is None):
                raise ValueError(f"{name}: got {value!r}, wants a whole number from 1")
        for name, (least, most, words) in _NUMBERS.items():
            value = getattr(self, name)
            if name == "ema" and value is None:
                continue
            if not isinstance(value, (int, float)):
                raise TypeError(f"{name}: got {value!r:.50}, wants a number")
            if not least <= value <= most:
                raise ValueError(f"{name}: got {value!r}, wants {words}")
        for name in ("optimizer", "scheduler"):
            value = getattr(self, name)
            if not (value is None or callable(value)):
                raise TypeError(f"{name}: got {kind_of(value)}, wants a function that makes one, or None")
        for name in ("learning_rate", "weight_decay"):
            usual = next(field.default for field in fields(self) if field.name == name)
            if self.optimizer is not None and getattr(self, name) != usual:
                raise ValueError(f"{name}: got {getattr(self, name)!r} beside an optimizer, which has its own")
        weights = () if self.weights is None else self.weights
        if not (isinstance(weights, Sequence) and all(isinstance(weight, (int, float)) for weight in weights)):
            raise TypeError(f"weights: got {weights!r:.50}, wants a number for each exit, or None")
        if self.gradients != "equal" and self.method == "heads":
            raise ValueError(
                f"gradients: got {self.gradients!r} for the method 'heads', whose backbone is frozen, so that none "
                "flow into it; wants 'equal', or the method 'joint'"
            )
        if self.gradients == "depth" and self.weights is not None:
            raise ValueError(
                f"weights: got {weights!r:.50} beside the gradients 'depth', which weigh losses; wants None"
            )

    def weights_of(self, exits: int) -> tuple[float, ...] | None:
        """Return the weights of so many exits' losses; None weighs all the same."""
        return tuple(map(float, range(1, exits + 1))) if self.gradients == "depth" else self.weights


def epochs_for(images: int, batch_size: int) -> int:
    """Return a number of epochs for so many training images: 10, or more for few images, for 120 steps in all."""
    return min(100, max(TrainingPlan.epochs, math.ceil(120 / (images // batch_size))))


def one_cycle(step: int, steps: int) -> float:
    """Return a step's share of the largest learning rate: a quarter of the steps up in a line, then down as a cosine.

    ``torch.optim.lr_scheduler.OneCycleLR`` divides by zero where a quarter is one step.
    """
    rise = max(1, steps // 4)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise + 1) / (steps - rise + 1)))


def joint_loss(
    exits: Sequence[Tensor], labels: Tensor, weights: Sequence[float] | None = None, *, label_smoothing: float = 0.0
) -> Tensor:
    """Return the weighted mean of the exits' cross-entropies: deep supervision (Lee et al. 2015, BranchyNet 2016).

    Args:
        exits: logits [N, K] of each exit, as :meth:`EarlyExitNetwork.logits` returns them.
        labels: [N] int64.
        weights: one an exit, from 0; divided by their sum. None weighs all the same.
        label_smoothing: the part of each label that all classes share.

    Returns:
        A scalar in nats, float32, of float64 logits float64.

    Raises:
        ValueError: weights that are not one an exit, or not numbers from 0 with a positive one among them.
        TypeError: exits that are no logits.
    """
    losses = torch.stack([_cross_entropy(logits, labels, label_smoothing) for logits in exits])
    return _weighted_mean(losses, weights)


def distillation_loss(
    exits: Sequence[Tensor],
    labels: Tensor,
    weights: Sequence[float] | None = None,
    *,
    temperature: float = 3.0,
    teacher_share: float = 0.5,
    label_smoothing: float = 0.0,
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
        label_smoothing: as in :func:`joint_loss`.

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
        by_labels = _cross_entropy(logits, labels, label_smoothing)
        losses.append((1.0 - teacher_share) * by_labels + teacher_share * temperature**2 * divergence)
    losses.append(_cross_entropy(exits[-1], labels, label_smoothing))
    return _weighted_mean(torch.stack(losses), weights)


def check_weights(weights: Sequence[float], exits: int) -> None:
    """Raise ``ValueError`` unless there is a weight for each exit, none below 0 and not all 0."""
    sound = all(0.0 <= weight < math.inf for weight in weights) and sum(weights) > 0
    if len(weights) != exits or not sound:
        raise ValueError(
            f"weights: got {list(weights)}, wants {exits}, one an exit, numbers from 0 with a positive one among them"
        )


def _cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    return F.cross_entropy(_wide(logits), labels, label_smoothing=label_smoothing)


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
