"""Batches of (images, labels) on their way to the network: checked, moved and laid out."""

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor

from ..arguments import kind_of
from ..early_exit_network import EarlyExitNetwork


def count_batches(name: str, batches: Any) -> int:
    """Return the number of batches; raises ``TypeError`` where it is not known, ``ValueError`` where it is 0."""
    try:
        if not isinstance(batches, Sized):
            raise TypeError
        count = len(batches)
    except TypeError:
        raise TypeError(
            f"{name}: got {kind_of(batches)}, whose length is not known, wants a DataLoader or a list, which has one"
        ) from None
    if not count:
        raise ValueError(f"{name}: got none, wants at least one; has the DataLoader fewer images than a batch?")
    return count


def on_device(images: Any, labels: Any, network: EarlyExitNetwork, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a batch on the network's device, maps as channels_last.

    Raises:
        TypeError: images or labels that are no tensors, or labels that are no int64.
        ValueError: labels of another shape than [N], or, where the host sees them, that are no classes.
    """
    for name, value in (("images", images), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"batches: got {kind_of(value)} for {name}, wants tensors (images, labels)")
    if labels.dtype != torch.int64:
        raise TypeError(f"batches: got labels of {labels.dtype}, wants torch.int64")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"batches: got labels {list(labels.shape)} for images {list(images.shape)}, wants [N]")
    classes = network.exit_heads[0].num_classes
    if labels.device.type == "cpu" and labels.numel() and not (0 <= labels.min() and labels.max() < classes):
        got = labels[(labels < 0) | (labels >= classes)][0].item()
        raise ValueError(f"batches: got label {got}, wants 0 to {classes - 1}, as the network has classes")
    x = images.to(device, non_blocking=True)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, labels.to(device, non_blocking=True)
