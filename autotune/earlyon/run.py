"""Runs the comparison seed by seed, keeps the rows in a file, and prints what they come to."""

from importlib.metadata import version
from pathlib import Path

import torch

from ...model.bad_input import BadInput
from ...model.calibration.report import environment
from ...model.commands.console import plain_console
from ...model.json_file import as_json
from ...model.replacing import writing
from ...model.training.data_sets import decode, load_digits, make_splits, split_indices
from .measure import DEPTH, IMAGE_SIZE, TAPS, Task, measured, work_at_exits
from .tables import comparison_table

FORMAT = "auxhead earlyon 1"


def run_earlyon(*, seeds: int, epochs: int, max_accuracy_drop: float, out: Path) -> None:
    """Compare, keep and print; the arguments are the options.

    Raises:
        BadInput: earlyon is not installed, or scikit-learn, with which the digits come.
    """
    try:
        import earlyon  # noqa: F401
    except ImportError:
        raise BadInput("earlyon: not installed, wants version 0.3: pip install earlyon==0.3.0") from None
    console = plain_console()
    images = decode(load_digits(), IMAGE_SIZE)
    rows, work = [], list[float]()
    for seed in range(seeds):
        splits = make_splits(images, split_indices(images.source, seed))
        task = Task(splits, len(images.source.classes), seed, epochs, max_accuracy_drop)
        work = work or work_at_exits(task)
        for row in measured(task, work):
            rows.append(row)
            console.print(
                f"seed {seed}, {row['way']}: {row['accuracy']:.1%} right, {row['left_early']:.1%} early, "
                f"{row['mean_work']:.0%} of the work"
            )
    content = {
        "format": FORMAT,
        "data": images.source.name,
        "earlyon": version("earlyon"),
        "backbone": f"earlyon's CIFAR ResNet-{DEPTH}, {IMAGE_SIZE}x{IMAGE_SIZE} pixels",
        "exits": [*TAPS, "classifier"],
        "work": work,
        "images": {name: len(split.labels) for name, split in zip(splits._fields, splits, strict=True)},
        "epochs": epochs,
        "max_accuracy_drop": max_accuracy_drop,
        "rows": rows,
        "environment": environment(torch.device("cpu")),
    }
    with writing(out) as file:
        file.write(as_json(content).encode())
    console.print("\n".join(comparison_table(content)), soft_wrap=True)
