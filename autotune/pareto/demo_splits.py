"""The images that a checkpoint of the demo was trained, calibrated and tested on, cut as the demo cut them."""

import json
from pathlib import Path

from ...model.bad_input import BadInput
from ...model.checkpoint import Checkpoint
from ...model.demo.report import REPORT_FORMAT
from ...model.training.data_sets import LabelledImages, Splits, decode, make_splits, split_indices


def demo_splits(directory: Path, checkpoint: Checkpoint, source: LabelledImages) -> Splits:
    """Cut images as the demo that wrote a checkpoint did: nothing that it learned from is in the test split.

    Raises:
        BadInput: no ``report.json`` in the checkpoint's ``directory``, or these are not the images that it is about.
    """
    path = directory / "report.json"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        found, data, seed, images = report["format"], report["data"], int(report["seed"]), report["images"]
        image_size = int(report["image_size"])
    except FileNotFoundError:
        raise BadInput(f"--checkpoint: {directory} has no report.json, wants a directory of `auxhead demo`") from None
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"--checkpoint: {path} is no report of `auxhead demo` ({error!r})") from None
    if found != REPORT_FORMAT:
        raise BadInput(f"--checkpoint: {path} has format {found!r}, wants {REPORT_FORMAT!r}")
    if source.name != data or source.classes != checkpoint.classes:
        raise BadInput(f"--checkpoint: {directory} was trained on {data}, got {source.name}; wants the same images")
    readable = decode(source, image_size, skip_damaged=True)  # as the demo did, if it had to
    splits = make_splits(readable, split_indices(readable.source, seed))
    sizes = {name: len(split.labels) for name, split in zip(Splits._fields, splits, strict=True)}
    if sizes != images:
        raise BadInput(f"--checkpoint: {directory} had images {images}, got {sizes}; wants the same images")
    return splits
