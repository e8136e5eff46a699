"""Runs the repeated calibration on the demo's network and its images, keeps the rows, and prints what they come to."""

from pathlib import Path
from statistics import mean

import torch

from ...model.calibration.exit_logits import collect_logits
from ...model.calibration.report import environment
from ...model.calibration.splits import draw_splits
from ...model.commands.console import plain_console
from ...model.demo.saved import load_demo
from ...model.description import content_hash, read_description, weights_name
from ...model.images import normalise
from ...model.json_file import as_json
from ...model.replacing import writing
from ...model.training.data_sets import load_source
from ..pareto.demo_splits import demo_splits
from .measure import repeated

FORMAT = "auxhead coverage 1"


def run_coverage(
    checkpoint: Path,
    data: Path | None,
    dataset: str | None,
    root: Path | None,
    *,
    max_accuracy_drop: float,
    confidence: float,
    repeats: int,
    out: Path,
) -> None:
    """Calibrate, keep and print; the arguments are the options.

    Raises:
        BadInput: no such checkpoint or images, or not the images that it was trained on.
    """
    loaded = load_demo(checkpoint)
    source = load_source(data, dataset, root)
    splits = demo_splits(checkpoint, loaded, source)
    pixels = torch.cat([splits.validation.pixels, splits.test.pixels])
    labels = torch.cat([splits.validation.labels, splits.test.labels])
    batches = zip(
        (normalise(part, loaded.mean, loaded.std) for part in pixels.split(256)), labels.split(256), strict=True
    )
    collected = collect_logits(loaded.network, batches)
    rows = list(repeated(loaded.network, collected, max_accuracy_drop, confidence, repeats))
    content = {
        "format": FORMAT,
        "data": source.name,
        "weights": content_hash(checkpoint / weights_name(read_description(checkpoint)))[:12],
        "exits": [*loaded.network.taps, "classifier"],
        "samples": {name: len(part) for name, part in draw_splits(collected.identities, 0).items()},
        "max_accuracy_drop": max_accuracy_drop,
        "confidence": confidence,
        "within": sum(row["within"] for row in rows),
        "reachable": sum(row["reachable"] for row in rows),
        "repeats": rows,
        "environment": environment(torch.device("cpu")),
    }
    with writing(out) as file:
        file.write(as_json(content).encode())
    drops = sorted(100 * row["accuracy_drop"] for row in rows)
    plain_console().print(
        f"Within the bound on the test split: {content['within']} of {repeats} splits; budget reachable in "
        f"{content['reachable']}.\nDrop of accuracy, points: {mean(drops):.2f} on average, {drops[0]:.2f} to "
        f"{drops[-1]:.2f}. Images that leave early: {100 * mean(1 - row['shares'][-1] for row in rows):.1f} %, at exit "
        f"{mean(row['mean_exit'] for row in rows):.1f} of 0 to {len(loaded.network.taps)} on average.",
        soft_wrap=True,
    )
