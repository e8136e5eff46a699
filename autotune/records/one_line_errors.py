"""Errors of commands that need no torch: one line, status 2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from .record import BadRecord


@contextmanager
def one_line_errors(file: Path) -> Iterator[None]:
    """Print ``BadRecord`` and errors of files as one line, and leave with status 2.

    Args:
        file: named where an error of files names none itself.
    """
    try:
        yield
    except BadRecord as error:
        message = str(error)
    except BrokenPipeError:  # whoever read the output has seen enough: no error of ours, click ends quietly
        raise
    except OSError as error:
        message = f"{error.filename or file}: {error.strerror or error}"
    else:
        return
    print(f"Error: {message}", file=sys.stderr)
    raise typer.Exit(2)
