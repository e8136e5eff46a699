"""``Runner``: the base of all runners, with what every one of them can be asked."""

from abc import ABC, abstractmethod
from typing import TypeVar

from torch import Tensor

from ..exit_result import ExitResult

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
