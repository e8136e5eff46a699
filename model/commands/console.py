"""The console of commands: names of files, classes and layers are printed as they are, brackets included."""

from rich.console import Console


def plain_console() -> Console:
    """Return a console on standard output, as wide as the terminal, that takes nothing for markup."""
    return Console(markup=False, emoji=False, highlight=False)
