"""Batches of (images, labels) on their way to the network: counted, checked and moved; and those of pixels."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from ..basics.arguments import check_dense, in_one_tensor, kind_of
from ..basics.images import normalise, random_shift
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import Samples
from ..processes.process_group import own_rank, ranks
from .data_sets import Split


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
        several = in_one_tensor(batch[:-1] if isinstance(batch, tuple) else batch) or _in_pairs(batch)
        raise TypeError(f"{name}: yields {kind_of(batch)}{count}, wants pairs of {parts}, without more parts{several}")
    return batch[0], batch[1]


def _in_pairs(batch: Any) -> str:
    """Say what makes pairs of a dict of two; "" for anything else."""
    if not isinstance(batch, Mapping) or len(batch) != 2:
        return ""
    x, y = sorted(batch, key=lambda name: str(name).startswith(("label", "target", "y")))
    return f": [(b[{x!r}], b[{y!r}]) for b in loader]"


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
            raise TypeError(f"{name}: got {kind_of(value)} for {part}, wants (images, labels){in_one_tensor(value)}")
        check_dense(f"{name}: {part}", value)
    if labels.dtype != torch.int64:
        raise TypeError(f"{name}: got labels of {labels.dtype}, wants torch.int64: labels.long(), [N]")
    if labels.shape != images.shape[:1]:
        wants = "[N]" if labels.ndim else "[N], as a DataLoader of the data set yields them"
        raise ValueError(f"{name}: got labels {list(labels.shape)} for images {list(images.shape)}, wants {wants}")
    classes = network.exit_heads[0].num_classes
    if labels.device.type == "cpu" and labels.numel() and not (0 <= labels.min() and labels.max() < classes):
        got = labels[(labels < 0) | (labels >= classes)][0].item()
        raise ValueError(f"{name}: got label {got}, wants 0 to {classes - 1}, as the network has classes")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all are finite numbers, a bool on their device, for which the host does not wait."""
    return torch.stack([each.isfinite().all() for each in tensors]).all()


class PixelBatches:
    """Batches (images [N, 3, H, W] float32, labels [N] int64) of decoded images, on the device that trains.

    With a seed they are those of a training: shuffled in every epoch; images that do not fill a last batch sit out, and
    of several processes that train together all draw the same batches, and each takes its part of them. Without one
    they are all images in order.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        device: torch.device,
        seed: int | None = None,
        largest_shift: int = 0,
    ) -> None:
        """Put the images onto the device.

        Args:
            split: the images.
            batch_size: N, of all processes together; at most the number of images.
            device: of the batches.
            seed: of order and shifts; None for no shuffling.
            largest_shift: pixels by which an image is shifted at most, either way; for shuffled ones.

        Raises:
            ValueError: a batch size that does not suit images or processes.
        """
        self._ranks, self._own_rank = (1, 0) if seed is None else (ranks(), own_rank())
        if not 1 <= batch_size <= len(split.labels) or batch_size % self._ranks:
            shareable = f", that {self._ranks} processes can share" if self._ranks > 1 else ""
            raise ValueError(
                f"batch_size: got {batch_size}, wants 1 to {len(split.labels)}, the number of images{shareable}"
            )
        self.generator = torch.Generator().manual_seed(0 if seed is None else seed)
        self._shuffled, self._split = seed is not None, split
        self._pixels, self._labels = split.pixels.to(device), split.labels.to(device)
        self._batch_size, self._largest_shift = batch_size, largest_shift

    def __len__(self) -> int:
        images = len(self._labels)
        return images // self._batch_size if self._shuffled else -(-images // self._batch_size)

    def samples(self) -> Samples:
        """Return hashes of the images, as they are without shifts."""
        return self._split.samples()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw an epoch's order and each batch's shifts, if shuffled, and go through the batches."""
        if not self._shuffled:
            for pixels, labels in zip(
                self._pixels.split(self._batch_size), self._labels.split(self._batch_size), strict=True
            ):
                yield normalise(pixels), labels
            return
        order = torch.randperm(len(self._labels), generator=self.generator, device="cpu").to(self._labels.device)
        for batch in order.split(self._batch_size)[: len(self)]:
            shifted = random_shift(self._pixels[batch], self._largest_shift, self.generator)
            own = slice(self._own_rank, None, self._ranks)
            yield normalise(shifted[own]), self._labels[batch[own]]
