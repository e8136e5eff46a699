"""Deep supervision: trains all exits at once, each by its own cross-entropy."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..early_exit_network import EarlyExitNetwork
from ..images import normalise, random_shift
from .data_sets import Split


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of a training: AdamW under a one-cycle schedule."""

    epochs: int = 10
    batch_size: int = 32
    learning_rate: float = 1e-3
    """The largest, at the top of the cycle."""
    weight_decay: float = 0.05
    largest_shift: int = 1
    """Pixels by which an image is shifted at most, either way, drawn anew in every epoch."""

    @classmethod
    def choose(cls, images: int, image_size: int, epochs: int | None = None) -> "TrainingPlan":
        """Return a plan for a number of training images; few images get more epochs, for 120 steps in all."""
        batch_size = min(cls.batch_size, images)
        if epochs is None:
            epochs = min(100, max(cls.epochs, math.ceil(120 / (images // batch_size))))
        return cls(epochs=epochs, batch_size=batch_size, largest_shift=image_size // 16)


def one_cycle(step: int, steps: int) -> float:
    """Return a step's share of the largest learning rate: a quarter of the steps up in a line, then down as a cosine.

    ``torch.optim.lr_scheduler.OneCycleLR`` divides by zero where a quarter is one step.
    """
    rise = max(1, steps // 4)
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise + 1) / (steps - rise + 1)))


class Step(NamedTuple):
    """One step of training."""

    epoch: int
    """From 0."""
    images: int
    """Images in the batch."""
    loss: float
    """Mean cross-entropy over all exits, in nats."""


def train(
    network: EarlyExitNetwork,
    split: Split,
    plan: TrainingPlan,
    *,
    seed: int,
    on_step: Callable[[Step], None] = lambda step: None,
) -> None:
    """Train backbone and heads together, in place, on the device where the network is.

    The loss is the mean of the cross-entropies of all exits, the classifier among them. Images that do not fill a
    last batch sit out the epoch. The network is left in eval mode.

    Args:
        network: heads and backbone in float32.
        split: the images to learn from; at least ``plan.batch_size`` images.
        plan: epochs, batch size and rates.
        seed: of the order of the images and of their shifts.
        on_step: called after every step, for a progress bar.
    """
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = split.pixels.to(device), split.labels.to(device)
    steps = len(labels) // plan.batch_size
    optimizer = torch.optim.AdamW(network.parameters(), lr=plan.learning_rate, weight_decay=plan.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, steps * plan.epochs))
    # channels_last is a tenth faster on the CPU, too, with two cores
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    network.train()
    for epoch in range(plan.epochs):
        order = torch.randperm(len(labels), generator=generator)
        for batch in order[: steps * plan.batch_size].view(steps, plan.batch_size).to(device):
            x = normalise(random_shift(pixels[batch], plan.largest_shift, generator))
            wanted = labels[batch]
            exits = network.logits(x.contiguous(memory_format=torch.channels_last))
            loss = torch.stack([F.cross_entropy(logits, wanted) for logits in exits]).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            on_step(Step(epoch, plan.batch_size, loss.item()))
    network.eval()
