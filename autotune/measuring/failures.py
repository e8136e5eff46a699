"""Failures of a measurement: a variant that was not timed, or a CUDA context that is lost."""

from typing import NamedTuple

#: Characters of an error's text that are kept.
_MOST_SAID = 500


class DeviceLost(RuntimeError):
    """The CUDA context takes no more work, so that nothing else can be measured by this process."""


class Failure(NamedTuple):
    """The reason why a variant was not timed; ``str`` of it is one line."""

    kind: str
    """In a few words that other failures may have in common."""
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return an error's type and text, in one line."""
        return cls(type(error).__name__, " ".join(str(error).split())[:_MOST_SAID])

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"
