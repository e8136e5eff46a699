"""Batches on their way to the network: counted, checked, moved, made of pixels, and noted by their contents."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..basics.arguments import check_dense, is_plain, kind_of
from ..listening.batches import check_input_batch, first_tensor, on_device, tensors_by_name
from ..network.early_exit_network import EarlyExitNetwork
from ..network.learned_from import LearnedFrom, Samples, identities, kind_of_input, short
from ..processes.dealing import exchanging, tensor_digest
from ..processes.process_group import own_rank, ranks
from .augment import augmented
from .data_sets import Split


def count_batches(name: str, batches: Any) -> int:
    """Return the number of batches; raises ``TypeError`` where it is not known, ``ValueError`` where it is 0."""
    try:
        count = len(batches)
    except TypeError:
        raise TypeError(
            f"{name}: got {kind_of(batches)}, whose length is not known, wants a DataLoader or a list, which has one"
        ) from None
    if not count:
        raise ValueError(f"{name}: got none, wants at least one; has the DataLoader fewer images than a batch?")
    return count


def pair_of(name: str, batch: Any, parts: str) -> tuple[Any, Any]:
    """Return input and labels of a batch: of a pair, or of a dict that has "labels" or "label" beside the input.

    Input in several parts is a tuple or dict of them. ``TypeError`` for anything else.
    """
    if isinstance(batch, Mapping) and len(found := [key for key in ("labels", "label") if key in batch]) == 1:
        return {key: each for key, each in batch.items() if key != found[0]}, batch[found[0]]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return tuple(batch[0]) if isinstance(batch[0], list) else batch[0], batch[1]
    got, how = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "", ""
    if isinstance(batch, (tuple, list)) and len(batch) > 2:
        how = "; if the last are the labels, and all others the backbone's arguments: ((a, b), labels)"
    if isinstance(batch, Mapping):
        got, how = f" of {', '.join(map(str, batch))}", ', or a dict with its labels under "labels"'
    raise TypeError(f"{name}: yields {kind_of(batch)}{got}, wants pairs of {parts}, without more parts{how}")


def all_on_device(
    name: str, batches: Iterable[Any], network: EarlyExitNetwork, device: torch.device, count: int | None = None
) -> Iterator[tuple[Any, Tensor]]:
    """Yield the batches (images, labels) of an argument on the network's device, images laid out as they come.

    ``TypeError`` or ``ValueError`` for batches that are no pairs of tensors or empty, labels that are no int64 [N] or,
    where the host sees them, no classes, and for another number of batches than ``count``, their length.
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
        yield on_device(images, device), labels.to(device, non_blocking=True)
    if count is not None and found < count:
        raise ValueError(f"{name}: yields {found} batches, wants {count}, as its length says")


def _check(name: str, images: Any, labels: Any, network: EarlyExitNetwork) -> None:
    if not isinstance(images, (Tensor, tuple, Mapping)):
        raise TypeError(f"{name}: got {kind_of(images)} for images, wants (images, labels)")
    if not isinstance(labels, Tensor):
        raise TypeError(f"{name}: got {kind_of(labels)} for labels, wants (images, labels)")
    for part, value in (("images", images), ("labels", labels)):
        for each in tensors_by_name(value).values():
            check_dense(f"{name}: {part}", each)
    check_input_batch(f"{name}: images", images, may_be_empty=True)
    first = first_tensor(images)
    if labels.dtype != torch.int64:
        raise TypeError(f"{name}: got labels of {labels.dtype}, wants torch.int64: labels.long(), [N]")
    if labels.shape != first.shape[:1]:
        wants = "[N]" if labels.ndim else "[N], as a DataLoader of the data set yields them"
        raise ValueError(f"{name}: got labels {list(labels.shape)} for images {list(first.shape)}, wants {wants}")
    classes = network.exit_heads[0].num_classes
    if labels.device.type == "cpu" and labels.numel() and not (0 <= labels.min() and labels.max() < classes):
        got = labels[(labels < 0) | (labels >= classes)][0].item()
        raise ValueError(f"{name}: got label {got}, wants 0 to {classes - 1}, as the network has classes")


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Return whether all are finite numbers, a bool on their device, for which the host does not wait."""
    return torch.stack([each.isfinite().all() for each in tensors]).all()


class ShuffledBatches:
    """Number and order of batches: with a seed shuffled in every epoch, where images that fill no last one sit out."""

    def __init__(self, labels: Tensor, batch_size: int, seed: int | None) -> None:
        """Take labels [M] of all images, on the device where batches are made; without a seed these stay in order."""
        self.generator = torch.Generator().manual_seed(0 if seed is None else seed)
        self._labels, self._batch_size, self._shuffled = labels, batch_size, seed is not None

    def __len__(self) -> int:
        images = len(self._labels)
        return images // self._batch_size if self._shuffled else -(-images // self._batch_size)

    def _order(self) -> Sequence[Tensor]:
        """Draw an epoch's order, if shuffled, and return the indices of each batch."""
        images = len(self._labels)
        order = torch.arange(images, device="cpu")
        if self._shuffled:
            order = torch.randperm(images, generator=self.generator, device="cpu")
        return order.to(self._labels.device).split(self._batch_size)[: len(self)]


class PixelBatches(ShuffledBatches):
    """Batches (images [N, C, H, W] float32, labels [N] int64) of decoded images, on the device that trains.

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
        augment: str = "none",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Put the images onto the device; ``ValueError`` for a batch size that does not suit images or processes.

        Args:
            split: the images.
            batch_size: N, of all processes together; at most the number of images.
            device: of the batches.
            seed: of order and changes; None for no shuffling.
            augment: how images are changed at random, see :func:`augmented`; for shuffled ones.
            dtype: of the images.
        """
        self._ranks, self._own_rank = (1, 0) if seed is None else (ranks(), own_rank())
        if not 1 <= batch_size <= len(split.labels) or batch_size % self._ranks:
            shareable = f", that {self._ranks} processes can share" if self._ranks > 1 else ""
            raise ValueError(
                f"batch_size: got {batch_size}, wants 1 to {len(split.labels)}, the number of images{shareable}"
            )
        super().__init__(split.labels.to(device), batch_size, seed)
        self.split, self._pixels, self.augment = split, split.pixels.to(device), augment
        self._dtype = dtype

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Go through an epoch's batches, and draw each one's changes."""
        own = slice(self._own_rank, None, self._ranks)
        for batch in self._order():
            changed = augmented(self._pixels[batch], self.augment, self.generator, own)
            yield self.split.preprocessing.normalised(changed).to(self._dtype), self._labels[batch[own]]


class SampleLog:
    """Samples that batches have yielded; where these change them at random, it is said that they are not known.

    Of :class:`PixelBatches` the images are known before they are changed. What others yield is hashed as it is: in a
    second epoch, or a batch drawn once more if there is one epoch alone, the same samples come again, and those that
    ``drop_last`` had left out; or they change.
    """

    def __init__(self, batches: Any, network: EarlyExitNetwork) -> None:
        """Log no batches yet, or all that the images are of; the network knows which mask tells padding."""
        self._batches, self._mask_in = batches, network.mask_in
        known = batches.split.samples() if isinstance(batches, PixelBatches) else None
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        self._seen = none if known is None else torch.cat(list(known.hashes)).unique()
        self._known, self._kinds = known is not None, set() if known is None else set(known.kinds)
        self._epochs, self._first, self._left_out = 0, self._seen, 0

    def watched(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of an epoch, and log them."""
        found: list[Tensor] = []
        for batch in batches:
            if not (self._known or len(self._seen) > ranks() * (len(self._first) + self._left_out)):
                self._hash(batch, found)
            yield batch
        if found:
            self._end_epoch(torch.cat(found))

    def _hash(self, batch: Any, found: list[Tensor]) -> None:
        with suppress(TypeError, ValueError):  # what is no batch the training refuses
            x, _ = pair_of("batches", batch, "")
            check_input_batch("batches", x)
            if not all(map(is_plain, tensors_by_name(x).values())):
                return
            mask = self._mask_in(x)
            found.append(short(identities(x, mask)))
            self._kinds.add(kind_of_input(x, mask))

    def _end_epoch(self, own: Tensor) -> None:
        self._seen = torch.cat([self._seen, own]).unique()
        if not self._epochs:
            self._first = self._seen
            with suppress(AttributeError, TypeError):  # no sampler, or one without a length
                drawn: Any = self._batches.batch_sampler
                self._left_out = max(0, len(drawn.sampler) - len(own)) if drawn.drop_last else 0
        self._epochs += 1

    def digest(self) -> str | None:
        """Return a hash of the images, where they are known before the first epoch; a resumed training has the same."""
        return tensor_digest(self._seen) if self._known else None

    def added_to(self, learned: LearnedFrom) -> LearnedFrom:
        """Return what was learned before with the logged samples of all processes."""
        if self._epochs == 1 and not isinstance(self._batches, (list, tuple)):
            again: list[Tensor] = []
            self._hash(next(iter(self._batches), None), again)
            self._seen = torch.cat([self._seen, *again]).unique()
        parts: list[Any] = [(self._seen.tolist(), sorted(self._kinds), self._first.tolist(), self._left_out)]
        if ranks() > 1:
            with exchanging() as exchange:
                parts = [json.loads(part) for part in exchange(json.dumps(parts[0]).encode())]
        seen, first = ({one for part in parts for one in part[place]} for place in (0, 2))
        hashes = torch.tensor(sorted(seen), dtype=torch.int64, device="cpu")
        learned = learned.plus("weights", Samples([hashes], frozenset(kind for part in parts for kind in part[1])))
        if len(seen) <= len(first) + sum(part[3] for part in parts):
            return learned
        return learned.but("its training changed samples at random, or drew others in each epoch: not all are noted")
