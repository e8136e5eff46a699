"""The demo's report: the content of ``report.json``, with the machine that measured it, and its tables in print."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ...basics.machine import package_version
from ...calibration.report import report_environment


@dataclass(frozen=True)
class ExitReport:
    """One exit on the test split; shares and accuracies are from 0 to 1."""

    name: str
    """The tapped block, or "classifier"."""
    threshold: float | None
    """The confidence that an image must exceed; 1.0 never exits, None is the classifier."""
    images: int
    """Number of images that left here."""
    share: float
    """Share of the test split that left here."""
    accuracy: float | None
    """Accuracy on the images that left here; None where none did."""
    accuracy_on_all: float
    """This exit's accuracy if it answered for the whole test split."""


@dataclass(frozen=True)
class DemoReport:
    """The content of ``report.json``; shares and accuracies are from 0 to 1."""

    format: str
    data: str
    classes: int
    image_size: int
    """Pixels, height and width."""
    seed: int
    epochs: int
    images: dict[str, int]
    """Number of images in each split."""
    exits: list[ExitReport]
    """The heads, then the classifier."""
    accuracy: float
    """Accuracy of early exit on the test split."""
    full_accuracy: float
    """Accuracy of the classifier on the same images."""
    accuracy_drop_points: float
    """Accuracy of the full network less that of early exit, in percentage points."""
    left_before_last_block: float
    """Share of the test split that had left before layer4.1 ran."""
    mean_blocks: float
    """Blocks that ran before an image's exit, mean over the test split; counted, not timed."""
    blocks: int
    max_accuracy_drop: float
    """Largest loss of accuracy on the validation split that the thresholds were chosen for."""
    validation: dict[str, float]
    """``accuracy`` and ``full_accuracy`` on the validation split."""
    latency: list[dict[str, Any]] | None
    """A row for each batch size, mode and variant: batch, mode, variant, calls, and device_us and host_us with median,
    p20 and p80; None where there is no CUDA device."""
    environment: dict[str, Any]
    seconds: dict[str, float]
    """Wall time of each phase."""


#: The value of ``format``; figures refuse others.
REPORT_FORMAT = "auxhead demo report 1"


def demo_environment(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions that a report's numbers belong to."""
    return {
        **report_environment(device),
        "device_type": device.type,
        "cpu_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        **{name: package_version(name) for name in ("torchvision", "triton")},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


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
