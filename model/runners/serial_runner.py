"""``SerialRunner``: the base of runners that answer one request at a time: their lock, refresh and end."""

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from ...kernels.cuda.lifetimes import is_forked, keep_in_children, refuse_forked
from ..answers.exit_result import ExitResult
from ..basics.streams import OwnedLock
from ..network.early_exit_network import EarlyExitNetwork
from .checks import check_no_outer_capture, check_request
from .runner import REQUEST, Runner

_RunnerT = TypeVar("_RunnerT", bound="SerialRunner")


class SerialRunner(Runner):
    """Answers with what it has once, for batches of a few sizes; a call while another thread's is under way raises."""

    #: Whether it launches graphs: it is then of no use to a forked child.
    _uses_cuda = False

    def __init__(self, network: EarlyExitNetwork, example_input: Tensor, sizes: Sequence[int]) -> None:
        """Take requests like the example, of any number of samples; the sizes ascend."""
        self.network = network
        self._sizes = sizes
        self._shape, self._dtype, self._device = example_input.shape[1:], example_input.dtype, example_input.device
        self._busy = OwnedLock()
        self._under_way = False
        keep_in_children(self)

    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch [N, ...] on the CPU or on the device of the example input.

        The result is on that device, and ready for the caller's current stream there. A batch in pinned memory is read
        when that stream gets there: do not write to it before the result is there.

        Raises:
            ValueError, TypeError: a shape, device or dtype other than that of the example input; nothing is launched.
            RuntimeError: the runner is closed, or in another thread's call, or of the process that forked this one; or
                the current stream is being captured; nothing is launched. Or a head's tensors are no longer those that
                were captured; what was launched has read the captured ones, and its answer is thrown away. Or a layer
                has resized what it keeps.
        """
        self._refuse_while_busy()
        with REQUEST, self._busy:
            try:
                self._under_way = True
                self._refuse_closed()
                samples = check_request(x, self._shape, self._dtype, self._device)
                return self._request(x.detach() if x.requires_grad else x, samples)
            finally:
                self._under_way = False

    @abstractmethod
    def _request(self, x: Tensor, samples: int) -> ExitResult:
        """Answer for a batch that was checked."""

    def _size_for(self, samples: int) -> int:
        """Return the smallest size that holds so many samples."""
        return self._sizes[bisect_left(self._sizes, samples)]

    def _refuse_while_busy(self) -> None:
        # The lock alone would let a handler of signals in, of the same thread; an interrupt may have left the flag.
        if self._under_way and self._busy.is_taken():
            raise RuntimeError("this runner is in another thread's call; give each thread a runner of its own")

    def _refuse_closed(self) -> None:
        if self._uses_cuda:
            refuse_forked()
        if self._is_closed():
            raise RuntimeError("this runner is closed")

    @abstractmethod
    def _is_closed(self) -> bool:
        """Return whether what it answers with was freed."""

    def refresh(self) -> None:
        """Take over what was changed in place of the network's parameters and buffers, where the runner has copies.

        Raises:
            RuntimeError: a parameter or buffer of the network is no longer the one that was captured, but lies in other
                memory; or the runner is closed, or in another thread's call; or the current stream is being captured.
        """
        self._refuse_while_busy()
        with self._busy:
            try:
                self._under_way = True
                self._refuse_closed()
                self._refresh()
            finally:
                self._under_way = False

    @abstractmethod
    def _refresh(self) -> None:
        """Take over what was changed, while no request is under way on the host."""

    def close(self) -> None:
        """Wait for what is under way and free all that is held; a later call raises. Closing twice is fine.

        In a forked child it does nothing: the runner is its parent's.

        Raises:
            RuntimeError: called by a handler of signals within a call of this runner, which it would wait for; or the
                current stream is being captured.
        """
        self.check_closable()
        if not (self._uses_cuda and is_forked()):
            with self._busy:  # once other threads' calls are over
                if not self._is_closed():
                    self._free()

    @abstractmethod
    def _free(self) -> None:
        """Wait for what is under way on devices, and free what is held."""

    def check_closable(self) -> None:
        """Raise what :meth:`close` would raise now."""
        if self._busy.is_mine():
            raise RuntimeError("this runner is in a call of this thread, which close() would wait for")
        if self._uses_cuda and not (self._is_closed() or is_forked()):
            with torch.cuda.device(self._device):
                check_no_outer_capture()

    def __copy__(self: _RunnerT) -> _RunnerT:
        """Return the runner itself: what it has is there once."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or deeply copied."""
        raise TypeError("a runner holds graphs of this process; copy or save its network, and make a runner of that")
