"""Why something was not measured: a variant that failed, or a CUDA context that is lost."""

from typing import NamedTuple


class DeviceLost(RuntimeError):
    """The CUDA context takes no more work, so that nothing else can be measured by this process."""


class Failure(NamedTuple):
    """Why a configuration was not timed."""

    kind: str
    """In a few words that others may have in common."""
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return what an error says, in one line."""
        return cls(type(error).__name__, " ".join(str(error).split())[:300])

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"
