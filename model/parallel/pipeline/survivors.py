"""Open samples of several micro-batches, merged into full ones between two stages.

PyTorch's schedules send a micro-batch of one shape at each of a fixed number of steps. Merging keeps to that: a stage
collects what stays open, and at each step hands on a full micro-batch, if it has one, or an empty one, for which the
next stages compute nothing. At most ``size - 1`` samples are left when the last micro-batch has come, and one more step
lets them out.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: In the place of a row of a micro-batch that no sample uses.
NOBODY = -1
#: Of each row of a micro-batch the place of its sample in the request, [size] int64. They are the host's: NumPy's calls
#: take it less time than PyTorch's.
Places = NDArray[np.int64]


def no_places(size: int) -> Places:
    """Return the places of a micro-batch without samples."""
    return np.full(size, NOBODY)


class Merging:
    """Hands on full micro-batches of open samples, in their order."""

    extra_steps = 1
    """How many more micro-batches may come out of it than go in."""

    def __init__(self, size: int, handed: Sequence[Tensor]) -> None:
        """Hand on micro-batches of a size, with tensors like those in ``handed``, dense in memory, a row a sample."""
        self._size = size
        self._nothing = no_places(size), tuple(torch.zeros_like(each) for each in handed)
        self._begin_micro_batch()

    def _begin_micro_batch(self) -> None:
        self._places, self._held = no_places(self._size), 0
        self._handed = tuple(torch.empty_like(each) for each in self._nothing[1])

    def hand_on(
        self, places: Places, handed: Sequence[Tensor] | None, *, last: bool
    ) -> tuple[Places, tuple[Tensor, ...]]:
        """Return what goes to the next stage: a full micro-batch, or what is held after the last one, or nothing.

        Args:
            places: of this micro-batch; nobody's for samples that are answered.
            handed: what goes along with them; None if none is open.
            last: no more comes after it.
        """
        full = None if handed is None else self._hold(places, handed)
        if full is None and last and self._held:
            full = self._places, self._handed
            self._begin_micro_batch()
        return full or self._nothing

    def _hold(self, places: Places, handed: Sequence[Tensor]) -> tuple[Places, tuple[Tensor, ...]] | None:
        """Gather open samples; returns a micro-batch that is full with them."""
        open_ = np.flatnonzero(places != NOBODY)
        full, begin = None, 0
        on_device = torch.from_numpy(open_)
        if handed:
            on_device = on_device.to(handed[0].device, non_blocking=True)
        while begin < len(open_):
            end = min(len(open_), begin + self._size - self._held)
            until = self._held + end - begin
            self._places[self._held : until] = places[open_[begin:end]]
            for into, each in zip(self._handed, handed, strict=True):
                torch.index_select(each, 0, on_device[begin:end], out=into[self._held : until])
            self._held, begin = until, end
            if until == self._size:
                full = self._places, self._handed
                self._begin_micro_batch()
        return full
