"""Batches of the example that a plan is measured on, and the shares of its samples that leave at each exit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import decide
from ...kernels.patience import decide_in_order
from ..early_exit_network import EarlyExitNetwork
from ..exit_result import first_sure
from ..rule_order import wait_for_writes
from ..streams import has_streams

#: Different batches of the example that a measurement goes through.
_MOST_BATCHES = 16


def batches_of(example_input: Tensor, size: int) -> list[Tensor]:
    """Cut the example into batches of one size, filling a short one with its first samples again."""
    repeats = -(-size // len(example_input))
    samples = torch.cat([example_input] * repeats) if repeats > 1 else example_input
    return list(samples[: len(samples) // size * size].split(size))[:_MOST_BATCHES]


def exits_of(network: EarlyExitNetwork, batches: Sequence[Tensor]) -> Tensor:
    """Return [B, N] int64: the exit of each sample of each batch, by PyTorch's operations: none is compiled."""
    rules = [head.rule for head in network.exit_heads]
    exits = []
    with torch.inference_mode(False), torch.no_grad():
        for x in batches:
            if has_streams(x):
                wait_for_writes(rules, torch.cuda.current_stream(x.device))
            # of a copy: a backbone may change its input in place, and the batches are views of the user's example
            *early, last = network.logits(x.clone())
            said = decide_in_order(
                early, [(rule.temperature_tensor, rule.threshold_tensor, rule.criterion) for rule in rules]
            )
            said.append(decide(last, temperature=1.0, threshold=1.0))
            exits.append(first_sure(said, with_probs=False).exit_index)
    return torch.stack(exits).cpu()


def shares_of(exits: Tensor, taps: int) -> tuple[float, ...]:
    """Return the shares of some exits that are at each tap and, last, at the classifier, 0 to 1."""
    return tuple((exits.flatten().bincount(minlength=taps + 1) / exits.numel()).tolist())
