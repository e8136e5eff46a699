"""The demo's report: what ``report.json`` holds, and the machine that its numbers belong to."""

import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from ..machine import package_version, processor_name


@dataclass(frozen=True)
class ExitReport:
    """What one exit did on the test split; shares and accuracies from 0 to 1."""

    name: str
    """The tapped block, or "classifier"."""
    threshold: float | None
    """The confidence that a picture must exceed; 1.0 never exits, None is the classifier."""
    images: int
    """How many left here."""
    share: float
    """Of the test split."""
    accuracy: float | None
    """Of the pictures that left here; None where none did."""
    accuracy_on_all: float
    """What this exit would reach if it had to answer for the whole test split."""


@dataclass(frozen=True)
class DemoReport:
    """What ``report.json`` holds; shares and accuracies from 0 to 1."""

    format: str
    data: str
    classes: int
    image_size: int
    """Pixels, height and width."""
    seed: int
    epochs: int
    images: dict[str, int]
    """In each split."""
    exits: list[ExitReport]
    """The heads, then the classifier."""
    accuracy: float
    """Of early exit on the test split."""
    full_accuracy: float
    """Of the classifier on the same pictures."""
    accuracy_drop_points: float
    """Full network less early exit, in percentage points."""
    left_before_last_block: float
    """Share of the test split that had left before layer4.1 ran."""
    mean_blocks: float
    """Blocks before the exit, mean over the test split: what each picture alone would have needed, counted and not
    timed, every block alike."""
    blocks: int
    max_accuracy_drop: float
    """What the thresholds were allowed to cost on the validation split."""
    validation: dict[str, float]
    """accuracy and full_accuracy there."""
    latency: list[dict[str, Any]] | None
    """Medians by batch size and variant; None where there is no CUDA device."""
    environment: dict[str, Any]
    seconds: dict[str, float]
    """Wall time of each phase."""


#: Of :class:`DemoReport`; plots refuse others.
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
