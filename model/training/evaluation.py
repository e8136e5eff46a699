"""``AllExits`` and ``HeadsOnFeatures``, the two kinds of module that are trained, and the accuracy of each exit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..heads.module_head import AuxHead
from ..listening.kept import modes_kept
from ..network.early_exit_network import EarlyExitNetwork
from .batches import all_on_device


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """At the end, put all parts of a module into the modes, and give parameters the gradients, that they had."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        with modes_kept(module):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


class AllExits(nn.Module):
    """The logits of all exits of a network as one forward, which DistributedDataParallel can wrap."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits of every head and, last, of the classifier."""
        return self.network.logits(x)


class HeadsOnFeatures(nn.Module):
    """A network's heads, on features that its taps gave before; they share the parameters."""

    def __init__(self, heads: Sequence[AuxHead]) -> None:
        super().__init__()
        self._in_order = tuple(heads)
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of every head and the classifier's.

        Args:
            features: of each tap what its head's ``features`` are, and last the classifier's logits [N, K], which are
                handed on.
        """
        *read, final = features
        logits = [head.logits_of_features(each) for head, each in zip(self._in_order, read, strict=True)]
        return [*logits, final]


def accuracy_of_exits(network: EarlyExitNetwork, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Return the accuracy of every head and, last, of the classifier, each on all images, from 0 to 1.

    Args:
        network: on the device where it is; its mode stays as it is.
        batches: (images [N, ...], labels [N] int64).

    Raises:
        ValueError, TypeError: batches that are none, see :func:`train`.
    """
    device = next(network.parameters()).device
    return accuracies(AllExits(network), all_on_device("batches", batches, network, device)).tolist()


@torch.no_grad()
def accuracies(learner: nn.Module, batches: Iterable[tuple[Any, Tensor]]) -> Tensor:
    """Return the accuracy of each exit of a learner on batches that are on its device, float64 on that, too.

    Raises:
        ValueError: batches without an image.
    """
    right: Tensor | None = None
    images = 0
    with as_before(learner):
        learner.eval()
        for x, labels in batches:
            answers = torch.stack([_answers(logits) for logits in learner(x)])  # [exits, N]
            found = (answers == labels).sum(dim=1)
            right = found if right is None else right + found
            images += len(labels)
    if right is None or not images:
        raise ValueError("batches: got no image, wants at least one")
    return right.double() / images


def _answers(logits: Tensor) -> Tensor:
    """Return the labels [N] that logits say, -1 where one is no number, of which argmax says that it is the largest."""
    return logits.argmax(dim=1).where(~logits.isnan().any(dim=1), -1)
