"""``SampleLog``: notes which samples a training has gone through, by their contents."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..basics.arguments import is_plain
from ..network.learned_from import LearnedFrom, Samples, identities, kind_of_input, short
from ..processes.dealing import exchanging, tensor_digest
from ..processes.process_group import ranks
from .batches import PixelBatches


class SampleLog:
    """Samples that batches have yielded; where these change them at random, it is said that they are not known.

    Of :class:`PixelBatches` the images are known before they are shifted. What others yield is hashed as it is: in a
    second epoch, or a batch drawn once more if there is one epoch alone, the same samples come again, and those that
    ``drop_last`` had left out; or they change.
    """

    def __init__(self, batches: Any) -> None:
        """Log no batches yet, or all that the images are of."""
        self._batches = batches
        known = batches.samples() if isinstance(batches, PixelBatches) else None
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
        x = batch[0] if isinstance(batch, (tuple, list)) and batch else None
        if isinstance(x, Tensor) and is_plain(x) and x.ndim and len(x):  # what is no batch the training refuses
            found.append(short(identities(x)))
            self._kinds.add(kind_of_input(x))

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
