"""Answers for a split of images: of every exit by itself, and of early exit."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels import HeadOutput, decide
from ..basics.images import normalise
from ..listening.taps import listening
from ..network.early_exit_network import EarlyExitNetwork


class ExitAnswers(NamedTuple):
    """The answers of E heads and, last, of the classifier to M images, on the CPU."""

    label: Tensor
    """[E + 1, M] int64."""
    confidence: Tensor
    """[E + 1, M] float32."""


def batches(pixels: Tensor, device: torch.device, size: int = 256) -> Iterator[Tensor]:
    """Yield the network's input for pixels (uint8 [M, 3, H, W]) in batches of ``size``."""
    for chunk in pixels.split(size):
        yield normalise(chunk.to(device)).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def answers_of_all_exits(network: EarlyExitNetwork, pixels: Tensor) -> ExitAnswers:
    """Return the answers of each exit for all images, exiting or not, by the heads that run later."""
    device = next(network.parameters()).device
    labels, confidences = [], []
    answers: list[HeadOutput] = []
    for x in batches(pixels, device):
        network.check_taps(x)
        with listening(
            network.backbone, network.taps, lambda index, y: answers.append(network.heads[index](y)), network.reading
        ):
            logits = network.backbone(x)
        answers.append(decide(logits, temperature=1.0, threshold=1.0))
        labels.append(torch.stack([answer.label for answer in answers]))
        confidences.append(torch.stack([answer.confidence for answer in answers]))
        answers.clear()
    return ExitAnswers(torch.cat(labels, dim=1).cpu(), torch.cat(confidences, dim=1).cpu())


def early_exit_answers(network: EarlyExitNetwork, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Run the network with early exit; returns label and exit index, each [M] int64 on the CPU."""
    device = next(network.parameters()).device
    results = [network(x) for x in batches(pixels, device)]
    return torch.cat([r.label for r in results]).cpu(), torch.cat([r.exit_index for r in results]).cpu()
