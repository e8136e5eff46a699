"""Where commands print: names of users' files, classes and layers come out as they are, brackets included."""

from rich.console import Console


def plain_console(width: int | None = None) -> Console:
    """Return a console on standard output that takes nothing for markup, of the terminal's width or the given one."""
    return Console(width=width, markup=False, emoji=False, highlight=False)
