"""What is closed at the end of a ``with``."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing(ABC):
    """A runner that may be used as a context manager."""

    @abstractmethod
    def close(self) -> None:
        """Free what is held."""

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.close()
