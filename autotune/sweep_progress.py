"""What a sweep shows while it runs and when it is done."""

import time
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from .comparison import Difference
from .space import changes, text
from .sweep import Outcome, Status

#: What the table needs on a terminal.
WIDTH = 200


class SweepProgress:
    """How far a sweep is, about how long the rest takes, what is best so far, and what failed and why.

    A bar on a terminal, elsewhere a line for each thing that is measured.
    """

    def __init__(self, console: Console) -> None:
        """Show on ``console``."""
        self._console = console
        self._began = time.monotonic()
        self._progress = (
            Progress(
                TextColumn("{task.percentage:3.0f} %"), BarColumn(20), TextColumn("{task.description}"), console=console
            )
            if console.is_terminal
            else None
        )
        self._task = None if self._progress is None else self._progress.add_task("", total=1.0)

    def __enter__(self) -> "SweepProgress":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, status: Status) -> None:
        """Show what begins."""
        said = [status.doing]
        if status.best:
            said.append(f"best so far {status.best}")
        if status.failures:
            said.append(f"failed: {failures_in_words(status.failures)}")
        line = "; ".join(said)
        left = self._left(status.done)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=status.done, description=escape(f"{left}{line}"))
        else:
            self._console.print(f"{status.done:4.0%} {left}{line}", highlight=False, markup=False, soft_wrap=True)

    def _left(self, done: float) -> str:
        if not 0.0 < done < 1.0:
            return ""
        seconds = round((time.monotonic() - self._began) / done * (1.0 - done))
        return f"about {seconds // 60}:{seconds % 60:02d} left: "


def failures_in_words(failures: Counter[str]) -> str:
    """Count failures by their kinds, the most frequent first."""
    return ", ".join(f"{count} {kind}" for kind, count in failures.most_common())


def outcome_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    """Return a table of what was found, a shape of heads a row; winners are told by what of the rule's they change."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("taps", "by rule", "winner alone", "its time\n/ rule's, alone", "winner in situ"):
        drawn.add_column(heading, overflow="fold", no_wrap=heading == "by rule")
    for heading in ("network's time\n/ with rule's", "network's time\n/ with winner alone"):
        drawn.add_column(heading)
    drawn.add_column("")
    for found in outcomes:
        rule = found.target.rule
        drawn.add_row(
            ", ".join(found.target.taps),
            text(rule),
            "-" if found.alone is None else changes(found.alone, rule),
            _ratio(found.alone_over_rule),
            "-" if found.network is None else changes(found.network, rule),
            _ratio(found.over_rule),
            _ratio(found.over_alone),
            verdict_of(found),
        )
    return drawn


def verdict_of(found: Outcome) -> str:
    """Say in a word how the sweep ended: "win" over the rule's configuration in situ, "tie" or "failed"."""
    if found.network is None:
        return "failed"
    return "tie" if found.network == found.target.rule else "win"


def _ratio(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return f"{difference.median_ratio:.3f} ({difference.low:.3f}-{difference.high:.3f})"
