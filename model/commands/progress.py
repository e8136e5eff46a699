"""Progress of a command's phases: a bar on a terminal, elsewhere a line from time to time."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


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
