"""Record of the splits that a network was trained on, so that calibration uses images it has not seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bad_input import BadInput
from ..description import own_file
from ..json_file import read_json, write_json
from .data_sets import LabelledImages, Split, Splits, decode, make_splits, split_indices

FILE = "training.json"
FORMAT = "auxhead training 1"


def write_split_record(directory: Path, source: LabelledImages, splits: Splits, *, seed: int, image_size: int) -> None:
    """Write what the splits can be cut by again, beside a checkpoint."""
    write_json(
        directory / FILE,
        {
            "format": FORMAT,
            "data": source.name,
            "classes": list(source.classes),
            "seed": seed,
            "image_size": image_size,
            "images": _sizes(splits),
        },
    )


def unseen_split(directory: Path, source: LabelledImages) -> Split | None:
    """Cut images as ``auxhead train`` did that wrote a checkpoint, and return the test split.

    Its images have neither been learned from nor chosen the best epoch. None if there is no record beside the
    checkpoint, as another program has written it.

    Raises:
        BadInput: a damaged record, or other images than those that it is about.
    """
    path = directory / FILE
    if not path.exists():
        return None
    own_file(directory, FILE)
    try:
        record: dict[str, Any] = read_json(path)
        found, data, classes = record["format"], record["data"], record["classes"]
        seed, image_size, images = record["seed"], record["image_size"], record["images"]
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"--checkpoint: {path} is no record of `auxhead train` ({error!r:.100})") from None
    if found != FORMAT:
        raise BadInput(f"--checkpoint: {path} has format {found!r:.60}, wants {FORMAT!r}")
    if not (type(seed) is int and 0 <= seed < 2**63 and type(image_size) is int and 0 < image_size <= 4096):
        raise BadInput(f"--checkpoint: {path} has seed {seed!r:.40} and image_size {image_size!r:.40}, wants integers")
    if source.name != data or list(source.classes) != classes:
        raise BadInput(
            f"--checkpoint: {directory} was trained on {data!s:.60}, got {source.name}; wants the same images"
        )
    readable = decode(source, image_size, skip_damaged=True)  # as training did, if it had to
    splits = make_splits(readable, split_indices(readable.source, seed))
    if _sizes(splits) != images:
        sizes = _sizes(splits)
        raise BadInput(f"--checkpoint: {directory} had images {images!s:.60}, got {sizes}; wants the same images")
    return splits.test


def _sizes(splits: Sequence[Split]) -> dict[str, int]:
    return {name: len(split.labels) for name, split in zip(Splits._fields, splits, strict=True)}
