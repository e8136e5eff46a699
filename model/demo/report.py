"""The demo's report: the content of ``report.json``, with the machine that measured it."""

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from ..machine import package_version, processor_name


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


def environment(device: torch.device) -> dict[str, Any]:
    """Return the machine and the versions that a report's numbers belong to."""
    processor = processor_name() or platform.processor() or f"{os.cpu_count()}-core CPU"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "device_type": device.type,
        "cpu_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: package_version(name) for name in ("torch", "torchvision", "triton", "auxhead")},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
