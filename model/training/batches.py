"""Batches of (images, labels) on their way to the network: counted, checked and moved."""

from collections.abc import Iterable, Iterator, Sized
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


def pair_of(name: str, batch: Any, parts: str) -> tuple[Any, Any]:
    """Return the two parts of a batch; raises ``TypeError`` unless it is a tuple or list of two."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        count = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
        raise TypeError(f"{name}: yields {kind_of(batch)}{count}, wants pairs of {parts}, without more parts")
    return batch[0], batch[1]


def all_on_device(
    name: str, batches: Iterable[Any], network: EarlyExitNetwork, device: torch.device, count: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches (images, labels) of an argument on the network's device, images laid out as they come.

    Raises:
        TypeError: batches that are no pairs of tensors, or labels that are no int64.
        ValueError: an empty batch, labels of another shape than [N], or, where the host sees them, that are no classes;
            or another number of batches than ``count``, their length.
    """
    found = 0
    for batch in batches:
        if found == count:
            raise ValueError(f"{name}: yields more than {count} batches, wants as many as its length says")
        found += 1
        images, labels = pair_of(name, batch, "(images, labels)")
        _check(name, images, labels, network)
        if not len(labels):
            raise ValueError(f"{name}: batch {found} has no image, wants at least one in each")
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    if count is not None and found < count:
        raise ValueError(f"{name}: yields {found} batches, wants {count}, as its length says")


def _check(name: str, images: Any, labels: Any, network: EarlyExitNetwork) -> None:
    for part, value in (("images", images), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {kind_of(value)} for {part}, wants tensors (images, labels)")
    if labels.dtype != torch.int64:
        raise TypeError(f"{name}: got labels of {labels.dtype}, wants torch.int64")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{name}: got labels {list(labels.shape)} for images {list(images.shape)}, wants [N]")
    classes = network.exit_heads[0].num_classes
    if labels.device.type == "cpu" and labels.numel() and not (0 <= labels.min() and labels.max() < classes):
        got = labels[(labels < 0) | (labels >= classes)][0].item()
        raise ValueError(f"{name}: got label {got}, wants 0 to {classes - 1}, as the network has classes")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all are finite numbers, a bool on their device, for which the host does not wait."""
    return torch.stack([each.isfinite().all() for each in tensors]).all()
