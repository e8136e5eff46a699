"""Progress of a benchmark: exit patterns done, the variant under way, and about how long the rest takes."""

import time

from rich.console import Console
from rich.markup import escape


class BenchProgress:
    """Shows how far a run is: on a terminal one line that changes, elsewhere a line for each exit pattern of a cell.

    Lines that are to be kept are printed in either case.
    """

    def __init__(self, console: Console) -> None:
        self.total = 0
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._done = 0
        self._printed = -1
        self._began = time.monotonic()

    def __enter__(self) -> "BenchProgress":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, what: str, keep: bool) -> None:
        """Show what begins; ``keep`` prints it for good."""
        taken = time.monotonic() - self._began
        left = f", about {taken / self._done * (self.total - self._done) / 60:.0f} min left" if self._done else ""
        line = f"{self._done + 1} of {self.total}{left}: {what}"
        if self._status is not None:
            self._status.update(escape(line))
        if keep or (self._status is None and self._printed != self._done):
            self._console.print(line, soft_wrap=True)
            self._printed = self._done

    def unit_done(self) -> None:
        """Count one exit pattern of one cell."""
        self._done += 1
