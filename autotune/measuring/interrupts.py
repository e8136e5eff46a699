"""Interrupts (Ctrl-C) of commands whose records let the same command go on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def resumable() -> Iterator[None]:
    """At an interrupt (Ctrl-C) say in one line that nothing is lost, and leave with status 130, as shells have it."""
    try:
        yield
    except KeyboardInterrupt:
        print("Interrupted; what was measured is recorded: the same command goes on.", file=sys.stderr)
        raise typer.Exit(130) from None
