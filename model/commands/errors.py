"""Errors of commands: what the user can put right is one line on stderr and status 2."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..bad_input import BadInput


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Print ``BadInput``, the given kinds of errors and those of files as one line, and leave with status 2."""
    printed: tuple[type[Exception], ...] = (BadInput, *kinds)
    try:
        yield
    except printed as error:
        message = str(error)
    except BrokenPipeError:  # whoever read the output has seen enough: no error of ours, click ends quietly
        raise
    except OSError as error:  # no space, no permission
        message = f"{error.filename or 'file'}: {error.strerror or error}"
    else:
        return
    print(f"Error: {message}", file=sys.stderr)
    raise typer.Exit(2)
