"""The tables that ``auxhead calibrate`` prints: each exit and class on the test split, and what is promised."""

from rich.console import Console
from rich.table import Table

from ..calibration.report import CalibrationReport, most_telling

#: Of more classes than this the table has the most telling alone: half as many that are right least often, and half
#: that leave latest.
_MOST_CLASSES = 20


def print_report(console: Console, report: CalibrationReport) -> None:
    """Print a calibration for someone who has not read how it is made."""
    if report.chance is not None:
        console.print(report.chance, soft_wrap=True)
    known = " that nothing was chosen with" if report.bound.unknown is None else ""
    table = Table(title=f"Test split: {report.samples['test']:,} images{known}")
    table.add_column("exit")
    columns = ["leave if\nscore >", "leave\nhere", "right\nof these", "right\nof all"]
    columns += ["temper-\nature", "off by, %", "work"]
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
    legend = (
        "Right of all: if this exit answered for all images, as a network cut off there does. Off by: how far its "
        "confidence is from the rate of right answers, before / after its temperature (ECE)."
    )
    console.print("\n".join([legend, *report.sentences()]), soft_wrap=True)


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
