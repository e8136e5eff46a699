"""Progress of a measurement on the terminal: share done, time left, best so far, failures."""

import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from .cells import Cell

#: Shows what begins, and the share of a network that is done, 0 to 1.
Begins = Callable[[str, float], None]


class Status(NamedTuple):
    """Progress of a measurement at one moment."""

    done: float
    """Share of the whole, from 0 to 1."""
    doing: str
    best: str
    """Best so far of the target under way; empty if nothing was measured yet."""
    failures: Counter[str]
    """Failures of all targets, by kind."""


class SweepProgress:
    """Shows a bar on a terminal, elsewhere a line for each thing that is measured."""

    def __init__(self, console: Console) -> None:
        """Show on ``console``."""
        self._console = console
        self._began = time.monotonic()
        self._done = 0.0
        self._progress = Progress(
            TextColumn("{task.percentage:3.0f} %"), BarColumn(20), TextColumn("{task.description}"), console=console
        )
        self._task = self._progress.add_task("", total=1.0)

    def __enter__(self) -> "SweepProgress":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, status: Status) -> None:
        """Show what begins now."""
        parts = [status.doing]
        if status.best:
            parts.append(f"best so far {status.best}")
        if status.failures:
            parts.append(f"failed: {failures_in_words(status.failures)}")
        line = "; ".join(parts)
        self._done = max(self._done, status.done)  # some work goes back to what was done with
        left = self._left()
        if self._console.is_terminal:
            self._progress.update(self._task, completed=self._done, description=escape(f"{left}{line}"))
        else:
            self._console.print(f"{self._done:4.0%} {left}{line}", highlight=False, markup=False, soft_wrap=True)

    def of_network(self, cell: Cell, number: int, networks: int) -> Begins:
        """Return a function that shows what begins in a network, of which ``number`` of so many are done before."""
        return lambda what, share: self.show(Status((number + share) / networks, f"{cell}: {what}", "", Counter()))

    def _left(self) -> str:
        if not 0.0 < self._done < 1.0:
            return ""
        seconds = round((time.monotonic() - self._began) / self._done * (1.0 - self._done))
        return f"about {seconds // 60}:{seconds % 60:02d} left: "


def failures_in_words(failures: Counter[str]) -> str:
    """Count failures by their kinds, the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in failures.most_common())
