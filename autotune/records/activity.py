"""Shows on a terminal what a command is doing while it has nothing to print."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from ...model.commands.console import escaped


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Show ``what`` on standard error until the context ends, and nothing where that is no terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(escaped(what))):
            yield
    else:
        yield
