"""Console of commands: names without characters that a terminal obeys, and progress, a bar or lines."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
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


class PhaseProgress(Progress):
    """A progress bar on a terminal; elsewhere a line every ten seconds and one at the end."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("images, {task.fields[rate]} images/s"),
            TextColumn("{task.fields[remark]}", markup=False),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __call__(self, name: str, total: int) -> Callable[[int, str], None]:
        """Begin a phase of ``total`` images; returns a function that counts images as done, with a remark to show."""
        task = self.add_task(name, total=total, rate="-", remark="")
        done, printed = 0, time.monotonic()

        def advance(images: int, remark: str) -> None:
            nonlocal done, printed
            done += images
            speed = self.tasks[task].speed
            self.update(task, advance=images, rate=f"{speed:,.0f}" if speed else "-", remark=remark)
            if not self.console.is_terminal and (done == total or time.monotonic() > printed + 10.0):
                printed = time.monotonic()
                line = f"{name}: {done:,} of {total:,} images" + (f", {remark}" if remark else "")
                self.console.print(line, soft_wrap=True)

        return advance
