"""``TrainingPlan``: the settings of a training, and the learning rate of each of its steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: What is trained, by the name of the method.
METHODS = ("joint", "heads", "distill")
#: Number formats of the forward pass; parameters and gradients stay as they are in all.
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a training: AdamW (Loshchilov & Hutter 2019) under a one-cycle schedule (Smith & Topin 2018).

    Raises:
        ValueError, TypeError: a setting out of its range, or of another type.
    """

    method: str = "joint"
    """``"joint"``: all parameters that require gradients, by the cross-entropies of all exits. ``"heads"``: the heads
    alone, on features of the frozen backbone that are computed once. ``"distill"``: as ``"joint"``, and each head also
    learns from the last exit, see :func:`distillation_loss`."""
    epochs: int = 10
    """Passes over the images."""
    learning_rate: float = 1e-3
    """The largest, at the top of the cycle."""
    weight_decay: float = 0.05
    weights: tuple[float, ...] | None = None
    """Of each exit's loss, the classifier's last (of ``"heads"`` without it); None weighs all the same."""
    temperature: float = 3.0
    """Of ``"distill"``: divides the logits of student and teacher."""
    teacher_share: float = 0.5
    """Of ``"distill"``: the teacher's share of a head's loss, from 0 to 1; the labels have the rest."""
    precision: str = "float32"
    """``"float32"``, or ``"bfloat16"`` or ``"float16"`` by autocast; losses of float16 are scaled. A network in float64
    trains in that, under ``"float32"``, which is no autocast."""
    accumulate: int = 1
    """Batches whose gradients are averaged for one step; the rest at the end of an epoch makes a step of its own."""
    patience: int | None = None
    """Epochs in a row without a better mean accuracy of the exits after which training stops; None never stops."""

    def __post_init__(self) -> None:
        for name, wanted in (("method", METHODS), ("precision", PRECISIONS)):
            if getattr(self, name) not in wanted:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wants one of {', '.join(map(repr, wanted))}")
        for name in ("epochs", "accumulate", "patience"):
            value = getattr(self, name)
            if not (type(value) is int and value > 0 or name == "patience" and value is None):
                raise ValueError(f"{name}: got {value!r}, wants a whole number from 1")
        for name in ("learning_rate", "weight_decay", "temperature", "teacher_share"):
            if not isinstance(getattr(self, name), (int, float)):
                raise TypeError(f"{name}: got {getattr(self, name)!r:.50}, wants a number")
        weights = () if self.weights is None else self.weights
        if not (isinstance(weights, Sequence) and all(isinstance(weight, (int, float)) for weight in weights)):
            raise TypeError(f"weights: got {weights!r:.50}, wants a number for each exit, or None")
        for name in ("learning_rate", "temperature"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, wants a positive number")
        if not 0.0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay: got {self.weight_decay!r}, wants a number from 0")
        if not 0.0 <= self.teacher_share <= 1.0:
            raise ValueError(f"teacher_share: got {self.teacher_share!r}, wants a number from 0 to 1")


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
