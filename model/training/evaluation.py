"""Accuracy of each exit on labelled images, each answering for all of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..early_exit_network import EarlyExitNetwork
from .batches import all_on_device
from .learners import AllExits, as_before


def accuracy_of_exits(network: EarlyExitNetwork, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the accuracy of every head and, last, of the classifier, each on all images, from 0 to 1.

    Args:
        network: on the device where it is; its mode stays as it is.
        batches: (images [N, ...], labels [N] int64).

    Raises:
        ValueError, TypeError: batches that are none, see :func:`train`.
    """
    device = next(network.parameters()).device
    return accuracies(AllExits(network), all_on_device("batches", batches, network, device))


@torch.no_grad()
def accuracies(learner: nn.Module, batches: Iterable[tuple[Any, Tensor]]) -> list[float]:
    """Return the accuracy of each exit of a learner on batches that are on its device; the host waits once, at the end.

    Raises:
        ValueError: batches without an image.
    """
    right: Tensor | None = None
    images = 0
    with as_before(learner):
        learner.eval()
        for x, labels in batches:
            answers = torch.stack([logits.argmax(dim=1) for logits in learner(x)])  # [exits, N]
            found = (answers == labels).sum(dim=1)
            right = found if right is None else right + found
            images += len(labels)
    if right is None or not images:
        raise ValueError("batches: got no image, wants at least one")
    return (right.double() / images).tolist()
