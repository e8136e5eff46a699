"""Saves the demo's network with sample images of the test split, and loads it again."""

from pathlib import Path

import torch

from ...basics.files import replacing
from ...basics.images import MEAN, STD
from ...saving.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ...saving.checkpoint_files import read_description
from .experiment import DemoRun
from .small_resnet import resnet18_small

#: The demo's backbone as its checkpoints name it.
BACKBONE = f"{resnet18_small.__module__}:{resnet18_small.__name__}"


def load_demo(directory: Path) -> Checkpoint:
    """Load the network that :func:`save_demo` wrote; raises ``BadInput`` where :func:`load_checkpoint` does."""
    checkpoint = load_checkpoint(directory, resnet18_small(len(read_description(directory)["classes"])))
    checkpoint.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return checkpoint


def save_demo(directory: Path, run: DemoRun) -> list[Path]:
    """Write the checkpoint, and if the source has no files, a test image for each of up to ten classes.

    Returns:
        Image files of the test split, one a class, to try ``auxhead infer`` on.
    """
    report, source = run.report, run.source
    accuracy = {"test": report.accuracy, "test_full_network": report.full_accuracy}
    save_checkpoint(
        directory, run.network, backbone=BACKBONE, classes=source.classes, image_size=report.image_size,
        mean=MEAN, std=STD, accuracy=accuracy,
    )  # fmt: skip
    examples = []
    test = run.splits.test
    for label in range(min(10, len(source.classes))):
        of_class = test.indices[test.labels == label].tolist()
        if not of_class:
            continue
        if source.paths is not None:
            examples.append(source.paths[of_class[0]])
            continue
        folder = directory / "examples"
        if folder.is_symlink():  # a link is replaced, and not written through
            folder.unlink()
        folder.mkdir(exist_ok=True)
        path = folder / f"{source.classes[label]}.png"
        with replacing(path) as unfinished:
            source.open[of_class[0]]().save(unfinished)
        examples.append(path)
    return examples
