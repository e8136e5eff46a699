"""The console of commands: names are printed as they are, but for characters that a terminal obeys."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

#: Characters that a terminal does not show but obeys, and those that turn the direction of writing.
_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str, but: str = "") -> str:
    """Return a text with control characters as Python writes them, but for some that are left."""
    return _OBEYED.sub(lambda found: found[0] if found[0] in but else ascii(found[0])[1:-1], text)


class _Escaping(Console):
    """A console that prints strings, in tables too, with control characters escaped."""

    def render_str(self, text: str, **how: Any) -> Text:
        return super().render_str(escaped(text, but="\n\t"), **how)


def plain_console(width: int | None = None) -> Console:
    """Return a console on standard output, as wide as the terminal, that takes nothing for markup.

    Characters that standard output cannot encode are escaped; where it is closed, nothing is printed.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    return _Escaping(width=width, markup=False, emoji=False, highlight=False)


@contextmanager
def activity(what: str) -> Iterator[None]:
    """Show ``what`` on standard error until the context ends, and nothing where that is no terminal."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(Text(escaped(what))):
            yield
    else:
        yield
