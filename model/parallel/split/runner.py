"""``SplitRunner``: the runner of a network split over several devices in one process; the way of a request."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ...early_exit_network import EarlyExitNetwork
from ...exit_result import ExitResult, joined
from ...owned_lock import OwnedLock
from ...runners.checks import check_request
from ...runners.runner import Runner
from .part import Part


class SplitRunner(Runner):
    """Answers for batches by parts of a network, each on its device; see :func:`parallelize`, which makes it.

    Thresholds, temperatures and whether an exit is enabled may change at any time; parameters may change in place,
    followed by ``refresh``. A batch is padded to the next of the batch sizes, one above the largest is split. One
    request at a time: a call while another thread's is under way raises.
    """

    def __init__(
        self, network: EarlyExitNetwork, parts: Sequence[Part], example_input: Tensor, sizes: Sequence[int], notes: str
    ) -> None:
        """Answer for batches like the example by parts of a network, which have segments for each size."""
        self.network = network
        self._parts = parts
        self._sizes = sizes
        self._shape, self._dtype, self._device = example_input.shape[1:], example_input.dtype, example_input.device
        self._notes = notes
        self._busy = OwnedLock()
        self._under_way = False
        self._closed = False

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of each part, in the order in which a batch goes through them."""
        return tuple(part.device for part in self._parts)

    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch [N, ...] on the first device or on the CPU.

        The result is on the first device, and ready for the caller's current stream there. A batch in pinned memory is
        read when that stream gets there: do not write to it before the result is there.

        Raises:
            ValueError, TypeError: a shape, device or dtype other than that of the example input; nothing is launched.
            RuntimeError: the runner is closed, or in another thread's call; or the current stream is being captured;
                nothing is launched. Or a head's tensors are no longer those that were captured; the answer is thrown
                away.
        """
        self._refuse_while_busy()
        with self._busy:
            try:
                self._under_way = True
                self._refuse_closed()
                samples = check_request(x, self._shape, self._dtype, self._device)
                return self._answer(x.detach() if x.requires_grad else x, samples)
            finally:
                self._under_way = False

    def _answer_in_parts(self, x: Tensor, samples: int) -> ExitResult:
        """Answer for a batch, split where it is larger than the largest size."""
        if samples <= self._sizes[-1]:
            return self._answer_one(x, self._size_for(samples))
        results = [self._answer_one(part, self._size_for(len(part))) for part in x.split(self._sizes[-1])]
        return joined(results)

    def _size_for(self, samples: int) -> int:
        return self._sizes[bisect_left(self._sizes, samples)]

    @abstractmethod
    def _answer(self, x: Tensor, samples: int) -> ExitResult:
        """Answer for a batch that was checked."""

    @abstractmethod
    def _answer_one(self, x: Tensor, size: int) -> ExitResult:
        """Answer for at most ``size`` samples by what there is for that size."""

    def _refuse_while_busy(self) -> None:
        # The lock alone would let a handler of signals in, of the same thread; an interrupt may have left the flag.
        if self._under_way and self._busy.is_taken():
            raise RuntimeError("this runner is in another thread's call; give each thread a runner of its own")

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this runner is closed")

    def describe(self) -> str:
        """Say which part of the network is on which device, with measured times, and how it runs."""
        self._refuse_closed()
        return self._notes

    def refresh(self) -> None:
        """Take over parameters and buffers of the network that were changed in place, where devices have copies.

        The host waits for all that is under way before, and for the copies.

        Raises:
            RuntimeError: the runner is closed, or in another thread's call; or the current stream is being captured; or
                a parameter was given other memory.
        """
        self._refuse_while_busy()
        with self._busy:
            try:
                self._under_way = True
                self._refuse_closed()
                self._refresh()
            finally:
                self._under_way = False

    def _refresh(self) -> None:
        for part in self._parts:
            part.refresh(self.network)

    def check_closable(self) -> None:
        """Raise what :meth:`close` would raise now."""
        if self._busy.is_mine():
            raise RuntimeError("this runner is in a call of this thread, which close() would wait for")

    def close(self) -> None:
        """Wait for what is under way and free what the devices hold; a later call raises. Closing twice is fine.

        Raises:
            RuntimeError: called by a handler of signals within a call of this runner, which it would wait for; or the
                current stream is being captured.
        """
        self.check_closable()
        with self._busy:  # once other threads' calls are over
            if not self._closed:
                self._free()
                self._parts = ()
                self._closed = True

    @abstractmethod
    def _free(self) -> None:
        """Free what the devices hold."""

    def __copy__(self) -> "SplitRunner":
        """Return the runner itself: what its devices hold is there once."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or deeply copied."""
        raise TypeError("a runner holds graphs of this process; copy or save its network, and make a runner of that")
