"""Failures of a measurement: a variant that was not timed, a CUDA context that is lost; and interrupts (Ctrl-C)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import typer

#: Characters of an error's text that are kept.
_MOST_SAID = 500


class DeviceLost(RuntimeError):
    """The CUDA context takes no more work, so that nothing else can be measured by this process."""


class WrongAnswer(RuntimeError):
    """Something answers wrongly, so that it is not timed."""


def refuse(wrong: str | None, name: str | None = None) -> None:
    """Raise ``WrongAnswer`` if anything is wrong, in words, with what is called ``name``."""
    if wrong is not None:
        raise WrongAnswer(wrong if name is None else f"{name}: {wrong}; not timed")


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


@contextmanager
def resumable() -> Iterator[None]:
    """At an interrupt (Ctrl-C) say in one line that nothing is lost, and leave with status 130, as shells have it."""
    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted; what was measured is recorded: the same command goes on.", file=sys.stderr)
        raise typer.Exit(130) from None
