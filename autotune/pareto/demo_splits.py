"""The images that a checkpoint of the demo was trained, calibrated and tested on, cut as the demo cut them."""

from pathlib import Path

from ...model.bad_input import BadInput
from ...model.checkpoint import Checkpoint
from ...model.demo.report import REPORT_FORMAT
from ...model.description import own_file
from ...model.json_file import read_json
from ...model.training.data_sets import LabelledImages, Splits, decode, make_splits, split_indices


def demo_splits(directory: Path, checkpoint: Checkpoint, source: LabelledImages) -> Splits:
    """Cut images as the demo that wrote a checkpoint did: nothing that it learned from is in the test split.

    Raises:
        BadInput: no ``report.json`` in the checkpoint's ``directory``, or these are not the images that it is about.
    """
    path = directory / "report.json"
    if not path.exists():
        raise BadInput(f"--checkpoint: {directory} has no report.json, wants a directory of `auxhead demo`")
    own_file(directory, path.name)
    try:
        report = read_json(path)
        found, data, images = report["format"], report["data"], report["images"]
        seed, image_size = report["seed"], report["image_size"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"--checkpoint: {path} is no report of `auxhead demo` ({error!r:.100})") from None
    if found != REPORT_FORMAT:
        raise BadInput(f"--checkpoint: {path} has format {found!r:.60}, wants {REPORT_FORMAT!r}")
    if checkpoint.image_size is None or image_size != checkpoint.image_size:
        raise BadInput(f"--checkpoint: {path} has image_size {image_size!r:.60}, the network {checkpoint.image_size}")
    if source.classes != checkpoint.classes or source.name != data:
        raise BadInput(
            f"--checkpoint: {directory} was trained on {data!s:.60}, got {source.name}; wants the same images"
        )
    if not (type(seed) is int and 0 <= seed < 2**63):
        raise BadInput(f"--checkpoint: {path} has seed {seed!r:.60}, wants a whole number, 0 or more")
    readable = decode(source, checkpoint.image_size, skip_damaged=True)  # as training did, if it had to
    splits = make_splits(readable, split_indices(readable.source, seed))
    if (sizes := {name: len(split.labels) for name, split in splits._asdict().items()}) != images:
        raise BadInput(f"--checkpoint: {directory} had images {images!s:.60}, got {sizes}; wants the same images")
    return splits
