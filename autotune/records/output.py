"""Output of records and figures as commands of model have it: consoles, errors in a line, whole files; no torch."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from ...model.basics.files import is_standard_output, replacing, writing
from ...model.commands.console import escaped, plain_console
from ...model.commands.errors import one_line_errors

__all__ = ["is_standard_output", "one_line_errors", "plain_console", "replacing", "writing"]


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Show ``what`` on standard error until the context ends, and nothing where that is no terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(escaped(what))):
            yield
    else:
        yield
