"""Tables that ``auxhead demo`` prints: exits on the test split, and latencies."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .report import DemoReport


def print_report(console: Console, report: DemoReport) -> None:
    """Print how the exits did on the test split, and the latencies if they were measured."""
    table = Table(title=f"Test split: {report.images['test']:,} images that neither training nor thresholds have seen")
    table.add_column("exit")
    for column in (
        "leaves if\nconfidence >", "images that\nleave here", "their\naccuracy", "accuracy if it\nanswered all"
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for line in report.exits:
        never = line.threshold is not None and line.threshold >= 1.0
        table.add_row(
            line.name,
            "the rest" if line.threshold is None else "never" if never else f"{line.threshold:.3f}",
            f"{line.images:,} ({line.share:.1%})",
            "-" if line.accuracy is None else f"{line.accuracy:.1%}",
            f"{line.accuracy_on_all:.1%}",
        )
    console.print(table)
    console.print(
        f"Early exit: {report.accuracy:.2%} accuracy; full network: {report.full_accuracy:.2%} "
        f"({_difference(-report.accuracy_drop_points)}).\n"
        f"{report.left_before_last_block:.1%} of the images left before the last block; on average an image had its "
        f"answer after {report.mean_blocks:.1f} of {report.blocks} blocks (counted, not timed).",
        soft_wrap=True,
    )
    if report.latency is None:
        console.print("Latency was not measured: the demo ran on the CPU, without a CUDA device.")
    else:
        console.print(_latency_table(report.latency, report.environment["device"]))


def _latency_table(rows: Sequence[Mapping[str, Any]], device: str) -> Table:
    table = Table(title=f"Latency, eager float32 on {device}, median (20th to 80th percentile)")
    for column in ("batch", "run as", "heads", "device, us", "host to answer, us"):
        table.add_column(column, justify="left" if column in ("run as", "heads") else "right")
    for row in rows:
        times = [
            f"{row[kind]['median']:,.0f}\n({row[kind]['p20']:,.0f}-{row[kind]['p80']:,.0f})"
            for kind in ("device_us", "host_us")
        ]
        table.add_row(str(row["batch"]), row["mode"], row["variant"], *times)
    return table


def _difference(points: float) -> str:
    text = f"{points:+.2f}"
    return "no difference" if text in ("+0.00", "-0.00") else f"{text} percentage points"
