"""The tables that ``auxhead calibrate`` prints: each exit and class on the test split, and what is promised."""

from rich.console import Console
from rich.table import Table

from .exits_by_class import most_telling
from .report import CalibrationReport

#: Of more classes than this the table has the most telling alone: half as many that are right least often, and half
#: that leave latest.
_MOST_CLASSES = 20


def print_report(console: Console, report: CalibrationReport) -> None:
    """Print a calibration for someone who has not read how it is made."""
    samples = report.samples
    table = Table(title=f"Test split: {samples['test']:,} images that nothing was chosen with")
    table.add_column("exit")
    columns = [
        "leave if\nscore >",
        "leave\nhere",
        "right\nof these",
        "right\nof all",
        "temper-\nature",
        "off by, %",
        "work",
    ]
    if report.latencies is not None:
        columns.append("answer\nin, ms")
    for column in columns:
        table.add_column(column, justify="right")
    for row in report.exits:
        last = row is report.exits[-1]
        cells = [
            row.name,
            "the rest" if last else "never" if row.threshold is None else f"{row.threshold:.3f}",
            f"{row.share:.1%}",
            "-" if row.accuracy is None else f"{row.accuracy:.1%}",
            f"{row.accuracy_on_all:.1%}",
            f"{row.temperature:.2f}",
            f"{100 * row.before.ece:.1f} / {100 * row.after.ece:.1f}",
            f"{row.work:.1%}",
        ]
        if row.latency_ms is not None:
            cells.append(f"{row.latency_ms:.3g}")
        table.add_row(*cells)
    console.print(table)
    console.print(_by_class(report))
    console.print("\n".join(_sentences(report)), soft_wrap=True)


def _by_class(report: CalibrationReport) -> Table:
    rows, each = report.classes, _MOST_CLASSES // 2
    title = "Test split by class"
    if len(rows) > _MOST_CLASSES:
        title += f": of {len(rows):,} the {each} that are right least often, and the {each} that leave latest"
        rows = most_telling(rows, each)
    table = Table(title=title)
    table.add_column("class")
    names = [row.name for row in report.exits]
    for column in ("images", "right", "full network\nright", *(f"leave at\n{name}" for name in names)):
        table.add_column(column, justify="right")
    for row in rows:
        shares = [None] * len(names) if row.shares is None else row.shares
        values: list[float | None] = [row.accuracy, row.full_accuracy, *shares]
        cells = ["-" if value is None else f"{value:.1%}" for value in values]
        table.add_row(row.name, f"{row.samples:,}", *cells)
    return table


def _sentences(report: CalibrationReport) -> list[str]:
    bound, said = report.bound, []
    said.append(
        "Right of all: if this exit answered for all images, as a network cut off there does. Off by: how far its "
        "confidence is from the rate of right answers, before / after its temperature (ECE)."
    )
    said.append(
        f"Early exit is right about {report.accuracy:.2%}, the full network about {report.full_accuracy:.2%}. On "
        f"average an image left at exit {report.mean_exit:.1f} of 0 to {len(report.exits) - 1}."
    )
    said.append(
        f"Work is the share of the backbone's FLOPs that an image takes; on average it was {report.expected_work:.1%}."
    )
    if bound.reason is not None:
        said.append(f"The budget cannot be kept: {bound.reason}.")
    if bound.max_accuracy_drop > 0.0:
        said.append(
            f"With {bound.confidence:.0%} confidence, accuracy on new images like these drops by at most "
            f"{bound.max_accuracy_drop:.2%}: of {bound.samples:,} images for thresholds, {bound.lost:,} were lost to "
            "early exit."
        )
    if report.latencies is not None:
        said.append(
            f"Expected time to the answer of a batch of {report.latencies.batch_size:,}: "
            f"{report.expected_latency_ms:.3g} ms; {report.latencies.milliseconds[-1]:.3g} ms if nobody leaves early "
            f"({report.latencies.runner}, {report.latencies.device})."
        )
    within = [row for row in report.exits[:-1] if row.accuracy_on_all >= report.accuracy]
    if within:
        said.append(f"The network cut off at {within[0].name} is as accurate on these images.")
    return said
