"""``PixelBatches``: batches of a split that is held in memory, in order, or shuffled and shifted in every epoch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..images import normalise, random_shift
from ..learned_from import Samples
from ..processes.process_group import own_rank, ranks
from .data_sets import Split


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
        order = torch.randperm(len(self._labels), generator=self.generator).to(self._labels.device)
        for batch in order.split(self._batch_size)[: len(self)]:
            shifted = random_shift(self._pixels[batch], self._largest_shift, self.generator)
            own = slice(self._own_rank, None, self._ranks)
            yield normalise(shifted[own]), self._labels[batch[own]]
