"""Batches of the example that a plan is measured on, and the shares of its samples that leave at each exit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..early_exit_network import EarlyExitNetwork
from ..runners.eager import EagerRunner

#: Different batches of the example that a measurement goes through.
_MOST_BATCHES = 16


def batches_of(example_input: Tensor, size: int) -> list[Tensor]:
    """Cut the example into batches of one size, filling a short one with its first samples again."""
    repeats = -(-size // len(example_input))
    samples = torch.cat([example_input] * repeats) if repeats > 1 else example_input
    return list(samples[: len(samples) // size * size].split(size))[:_MOST_BATCHES]


def exits_of(network: EarlyExitNetwork, batches: Sequence[Tensor]) -> Tensor:
    """Return [B, N] int64: the exit of each sample of each batch, by the eager runner."""
    eager = EagerRunner(network)
    with torch.inference_mode(False):
        # of copies: a backbone may change its input in place, and the batches are views of the user's example
        return torch.stack([eager(x.clone()).exit_index for x in batches]).cpu()


def shares_of(exits: Tensor, taps: int) -> tuple[float, ...]:
    """Return the shares of some exits that are at each tap and, last, at the classifier, 0 to 1."""
    return tuple((exits.flatten().bincount(minlength=taps + 1) / exits.numel()).tolist())
