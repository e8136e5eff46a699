"""Saves the demo's network with sample images of the test split, and loads it again."""

from pathlib import Path

from ..checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from ..training.data_sets import LabelledImages
from .experiment import DemoRun
from .small_resnet import ARCHITECTURE, small_early_exit_network


def load_demo(directory: Path) -> Checkpoint:
    """Load the network that :func:`save_demo` wrote; raises ``BadInput`` where :func:`load_checkpoint` does."""
    return load_checkpoint(directory, {ARCHITECTURE: small_early_exit_network})


def save_demo(directory: Path, run: DemoRun, source: LabelledImages) -> list[Path]:
    """Write the checkpoint, and if the source has no files, a test image for each of up to ten classes.

    Returns:
        Image files of the test split, one a class, to try ``auxhead infer`` on.
    """
    report = run.report
    accuracy = {"test": report.accuracy, "test_full_network": report.full_accuracy}
    save_checkpoint(
        directory,
        Checkpoint(run.network, source.classes, report.image_size, accuracy=accuracy),
        architecture=ARCHITECTURE,
    )
    examples = []
    test = run.splits.test
    for label in range(min(10, len(source.classes))):
        of_class = test.indices[test.labels == label].tolist()
        if not of_class:
            continue
        if source.paths is not None:
            examples.append(source.paths[of_class[0]])
            continue
        path = directory / "examples" / f"{source.classes[label]}.png"
        path.parent.mkdir(exist_ok=True)
        source.open[of_class[0]]().save(path)
        examples.append(path)
    return examples
