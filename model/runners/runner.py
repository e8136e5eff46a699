"""``Runner``: the base of all runners; ``EagerRunner``; and ``SerialRunner``: request, refresh and end of all others.

Also what keeps threads out of them when Python ends.
"""

import atexit
import sys
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from threading import Event, get_ident
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ...kernels.cuda.lifetimes import is_forked, keep_in_children, refuse_forked
from ...kernels.cuda.runtime import beside_captures
from ..answers.exit_result import ExitResult, joined
from ..answers.rule_order import count_writes, note_pass, wait_for_write, wait_for_writes
from ..basics.arguments import check_batch
from ..basics.streams import CallersStream, OwnedLock
from ..network.eager_pass import ExitsRepeats, run_eagerly
from ..network.early_exit_network import EarlyExitNetwork
from ..trunk.trunk import Trunk
from .captured_network import CapturedNetwork
from .captures import Captures
from .checks import check_no_outer_capture, check_request

#: Seconds to wait for requests under way, and then for threads to come with the next one.
_UNDER_WAY_S, _NEXT_S = 10.0, 0.1
#: By thread that has asked a runner, but for one that was stopped: whether it is in a request.
_asking: dict[int, bool] = {}
_ends_in: int | None = None


class _InRequest:
    """While open, this thread is in a request; while Python ends, other threads than that of the end are stopped.

    Such a daemon would come back from PyTorch to a Python that is no more, which ends the process (``terminate``).
    """

    def __enter__(self) -> None:
        me = get_ident()
        if _ends_in not in (None, me):
            _asking.pop(me, None)
            Event().wait()
        _asking[me] = True

    def __exit__(self, *_: object) -> None:
        _asking[get_ident()] = False


IN_REQUEST = _InRequest()


@atexit.register
def _stop_threads() -> None:
    global _ends_in
    _ends_in, began = get_ident(), time.monotonic()
    while states := [_asking[one] for one in {*sys._current_frames()} - {_ends_in} if one in _asking]:
        if time.monotonic() - began > (_UNDER_WAY_S if any(states) else _NEXT_S):
            break
        time.sleep(0.001)


_RunnerT = TypeVar("_RunnerT", bound="Runner")


class Runner(ABC):
    """Answers for batches of one network; as a context manager it closes itself at the end."""

    @abstractmethod
    def __call__(self, x: Any) -> ExitResult:
        """Answer for a batch like the example that it was made for, a tensor [N, ...] or several.

        Raises:
            ValueError, TypeError: a batch of another shape, device or dtype.
            RuntimeError: the runner is closed, or what it holds is no longer the network's; :class:`SerialRunner` has
                all cases.
        """

    @abstractmethod
    def describe(self) -> str:
        """Say in lines what was made of the network, and why."""

    @abstractmethod
    def refresh(self) -> None:
        """Take over parameters of the backbone that were changed in place, where the trunk holds copies of them."""

    @abstractmethod
    def close(self) -> None:
        """Free what is held; closing twice is fine."""

    def check_closable(self) -> None:
        """Raise what :meth:`close` would raise now."""
        return

    def wait_until_idle(self) -> None:
        """Let the host wait for what was launched on streams that no caller can wait for."""
        return

    def __enter__(self: _RunnerT) -> _RunnerT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EagerRunner(Runner):
    """Runs an :class:`EarlyExitNetwork` without a graph; see :func:`run_eagerly`."""

    def __init__(self, network: EarlyExitNetwork, *, trunk: Trunk | None = None) -> None:
        """Run a network, with ``trunk`` instead of its backbone if there is one; see :func:`run_eagerly`."""
        self.network = network
        self._repeats = ExitsRepeats()
        self._trunk = trunk

    @property
    def trunk(self) -> Trunk:
        """What runs in the place of the backbone, or the backbone as it is, for another runner to share."""
        network = self.network
        return self._trunk or Trunk(network.backbone, None, torch.contiguous_format, (), network.reading)

    def __call__(self, x: Tensor, *, stop: bool | None = None) -> ExitResult:
        """Answer for a batch of at least one sample that the backbone takes.

        ``stop`` is as in :func:`run_eagerly`; None stops on a CPU, where the host waits for nobody. A forward of the
        backbone is then left where it is: what it puts back at its end wants a ``finally``.
        """
        network, trunk = self.network, self._trunk
        check_batch("x", x)
        network.check_taps(x)
        backbone, classifier, reading, read = network.backbone, None, network.reading, None
        if trunk is not None:
            backbone, classifier, reading = trunk.module, trunk.classifier, trunk.reading
            if trunk.channels is not None and x.shape[1] == trunk.channels:
                raise ValueError(f"x: got {x.shape[1]} channels, wants as many as the backbone takes")
            read = wait_for_write(backbone, x)
            x = x.contiguous(memory_format=trunk.memory_format)
        with IN_REQUEST:
            answer = run_eagerly(
                backbone,
                network.taps,
                network.exit_heads,
                x,
                classifier=classifier,
                stop=(x.device.type == "cpu" and type(x) is Tensor) if stop is None else stop,
                repeats=self._repeats,
                monitor=network.monitor,
                reading=reading,
            )
        if read is not None:
            read.record(torch.cuda.current_stream(x.device))
        if backbone is not network.backbone:
            note_pass(x)  # which has read the trunk's own weights, and those go with this runner
        return answer

    def describe(self) -> str:
        """Say what was made of the trunk, a line each."""
        return "\n".join(() if self._trunk is None else self._trunk.notes)

    def refresh(self) -> None:
        """Take over parameters of the backbone that were changed in place, where the trunk holds copies of them."""
        if self._trunk is not None:
            self._trunk.refresh()

    def close(self) -> None:
        """Do nothing: an eager runner holds nothing."""


class SerialRunner(Runner):
    """Replays what was captured for a few batch sizes; a call while another thread's is under way raises."""

    #: Set by who captures: what there is for each batch size, the network as it was, and what requests read of writes.
    _captures: Captures
    _latest: CallersStream
    _captured: dict[int, Any]
    _network_then: CapturedNetwork
    _written: list[Any]
    _seen_writes = -1

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
        with IN_REQUEST, self._busy:
            try:
                self._under_way = True
                self._refuse_closed()
                samples = check_request(x, self._shape, self._dtype, self._device)
                return self._request(x.detach() if x.requires_grad else x, samples)
            finally:
                self._under_way = False

    def _request(self, x: Tensor, samples: int) -> ExitResult:
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                answer = self._run(x, samples)
        else:
            answer = self._run(x, samples)
        self._network_then.check_unchanged()  # while the device works; earlier it would delay the answer
        return answer

    def _run(self, x: Tensor, samples: int) -> ExitResult:
        check_no_outer_capture()
        if self._network_then.resizable:
            self._network_then.check_not_resized()
        if not self._latest.is_current():
            caller = torch.cuda.current_stream(self._device)
            self._captures.catch_up()
            caller.wait_event(self._captures.done)  # the last request may still use the buffers
            self._latest = CallersStream(caller)
        caller = self._latest.stream
        if self._seen_writes != (writes := count_writes()):
            self._follow_writes(caller)
            self._seen_writes = writes
        largest = self._sizes[-1]
        try:
            self._captures.asking = caller
            with beside_captures():  # PyTorch's allocator may have to ask the device for the answer's memory
                if samples <= largest:
                    return self._answer(self._captured[self._size_for(samples)], x, caller)
                parts = x.split(largest)
                return joined([self._answer(self._captured[self._size_for(len(part))], part, caller) for part in parts])
        finally:  # after an error, too: what has been launched uses the buffers
            self._captures.record(caller)

    @abstractmethod
    def _answer(self, captured: Any, x: Tensor, caller: torch.cuda.Stream) -> ExitResult:
        """Answer for at most as many samples as were captured; ``caller`` is the current stream."""

    def _follow_writes(self, caller: torch.cuda.Stream) -> None:
        """Let the caller's stream come after the last writes to what the graphs read."""
        wait_for_writes(self._written, caller)

    def _size_for(self, samples: int) -> int:
        """Return the smallest size that holds so many samples."""
        return self._sizes[bisect_left(self._sizes, samples)]

    def _refuse_while_busy(self) -> None:
        # The lock alone would let a handler of signals in, of the same thread; an interrupt may have left the flag.
        if self._under_way and self._busy.is_taken():
            raise RuntimeError("this runner is in another thread's call; give each thread a runner of its own")

    def _refuse_closed(self) -> None:
        refuse_forked()
        if not self._captured:
            raise RuntimeError("this runner is closed")

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
                self._network_then.check_unmoved(self.network)
                with torch.cuda.device(self._device):
                    check_no_outer_capture()
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
        if not is_forked():
            with self._busy:  # once other threads' calls are over
                if self._captured:
                    self._free()

    def _free(self) -> None:
        """Wait for what is under way on devices, and free what is held."""
        self._captures.free()
        self._network_then.clear()
        self._written.clear()

    def check_closable(self) -> None:
        """Raise what :meth:`close` would raise now."""
        if self._busy.is_mine():
            raise RuntimeError("this runner is in a call of this thread, which close() would wait for")
        if self._captured and not is_forked():
            with torch.cuda.device(self._device):
                check_no_outer_capture()

    def wait_until_idle(self) -> None:
        """Let the host wait for all that was launched, the part of a network too that an answer did not need."""
        self._captures.wait()

    def __copy__(self: _RunnerT) -> _RunnerT:
        """Return the runner itself: what it has is there once."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or deeply copied."""
        raise TypeError("a runner holds graphs of this process; copy or save its network, and make a runner of that")
