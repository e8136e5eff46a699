"""The console that commands print on: names of files, classes and layers come out as they are, brackets included."""

from rich.console import Console


def plain_console() -> Console:
    """Return a console on standard output, as wide as the terminal, that takes nothing for markup."""
    return Console(markup=False, emoji=False, highlight=False)
