"""Open samples between two stages: passed on as they come, or those of several micro-batches merged into full ones.

PyTorch's schedules send a micro-batch of one shape at each of a fixed number of steps. Merging keeps to that: a stage
collects what stays open, and at each step hands on a full micro-batch, if it has one, or an empty one, which the next
stages pass on without computing anything. Which rows are in use is part of what is sent. At most ``size - 1`` samples
are left when the last micro-batch has come, and one more step lets them out.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Of a sample that travels, beside its activations: its place in the request, -1 for a row that is empty; the label of
#: the last head, -1 at first; and how many heads in a row have said that label.
ROW = ("place", "label", "agreed")
#: Rows of a micro-batch as the host looks at them, [size, 3] int64: NumPy's calls take it less time than PyTorch's.
Rows = NDArray[np.int64]
_EMPTY = np.array([-1, -1, 0])


def empty_rows(size: int) -> Rows:
    """Return rows that no sample uses."""
    return np.tile(_EMPTY, (size, 1))


class Outlet(ABC):
    """Hands the open samples of a stage to the next one."""

    extra_steps = 0
    """How many more micro-batches may come out of it than go in."""

    def __init__(self, size: int, handed: Sequence[Tensor]) -> None:
        """Hand on micro-batches of a size, with activations like those in ``handed``, dense in memory."""
        self._size = size
        self._nothing = empty_rows(size), tuple(torch.zeros_like(each) for each in handed)

    @abstractmethod
    def hand_on(self, rows: Rows, handed: Sequence[Tensor] | None, *, last: bool) -> tuple[Rows, Sequence[Tensor]]:
        """Return what goes to the next stage.

        Args:
            rows: of this micro-batch; those of answered samples are empty.
            handed: its activations; None if all its rows are empty.
            last: no more comes after it.
        """


class Passing(Outlet):
    """Hands each micro-batch on as it is, answered samples with it, which nobody looks at any more."""

    def hand_on(self, rows: Rows, handed: Sequence[Tensor] | None, *, last: bool) -> tuple[Rows, Sequence[Tensor]]:
        """Return the same, or nothing."""
        return self._nothing if handed is None else (rows, handed)


class Merging(Outlet):
    """Hands on full micro-batches of open samples, in their order."""

    extra_steps = 1

    def __init__(self, size: int, handed: Sequence[Tensor]) -> None:
        super().__init__(size, handed)
        self._held = 0
        self._rows = empty_rows(2 * size)
        self._handed = [torch.empty(2 * size, *each.shape[1:], dtype=each.dtype, device=each.device) for each in handed]

    def hand_on(self, rows: Rows, handed: Sequence[Tensor] | None, *, last: bool) -> tuple[Rows, Sequence[Tensor]]:
        """Return a full micro-batch, as soon as there is one, or what is held after the last; else nothing."""
        if handed is not None:
            self._hold(rows, handed)
        if not self._held or (self._held < self._size and not last):
            return self._nothing
        full = self._rows[: self._size].copy(), [each[: self._size].clone() for each in self._handed]
        self._held = max(self._held - self._size, 0)
        self._rows[: self._held] = self._rows[self._size : self._size + self._held]
        for each in self._handed:
            each[: self._held] = each[self._size : self._size + self._held]
        self._rows[self._held :] = _EMPTY
        return full

    def _hold(self, rows: Rows, handed: Sequence[Tensor]) -> None:
        open_ = np.flatnonzero(rows[:, 0] >= 0)
        until = self._held + len(open_)
        self._rows[self._held : until] = rows[open_]
        on_device = None
        for into, each in zip(self._handed, handed, strict=True):
            on_device = torch.from_numpy(open_).to(each.device) if on_device is None else on_device
            torch.index_select(each, 0, on_device, out=into[self._held : until])
        self._held = until
