"""``Runner``: the base of all runners, what keeps threads out of them when Python ends, and ``EagerRunner``."""

import atexit
import sys
import time
from abc import ABC, abstractmethod
from threading import Event, get_ident
from typing import TypeVar

import torch
from torch import Tensor

from ..answers.exit_result import ExitResult
from ..answers.rule_order import note_pass, wait_for_write
from ..basics.arguments import check_batch
from ..network.eager_pass import ExitsRepeats, run_eagerly
from ..network.early_exit_network import EarlyExitNetwork
from ..trunk.trunk import Trunk

#: Seconds to wait for requests under way, and then for threads to come with the next one.
_UNDER_WAY_S, _NEXT_S = 10.0, 0.1
#: By thread that has asked a runner, but for one that was stopped: whether it is in a request.
_asking: dict[int, bool] = {}
_ends_in: int | None = None


class _Request:
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


REQUEST = _Request()


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
    def __call__(self, x: Tensor) -> ExitResult:
        """Answer for a batch x [N, ...]."""

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

    def __call__(self, x: Tensor, *, stop: bool = False) -> ExitResult:
        """Answer for a batch of at least one sample that the backbone takes; ``stop`` as in :func:`run_eagerly`."""
        network, trunk = self.network, self._trunk
        check_batch("x", x)
        network.check_taps(x)
        backbone, classifier, reading, read = network.backbone, None, network.reading, None
        if trunk is not None:
            backbone, classifier, reading = trunk.module, trunk.classifier, trunk.reading
            read = wait_for_write(backbone, x)
            x = x.contiguous(memory_format=trunk.memory_format)
        with REQUEST:
            answer = run_eagerly(
                backbone,
                network.taps,
                network.exit_heads,
                x,
                classifier=classifier,
                stop=stop,
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
