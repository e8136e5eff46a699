"""Record of the splits that a network was trained on, so that calibration uses images it has not seen."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..bad_input import BadInput
from ..description import own_file
from ..images import MOST_PIXELS
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
    if classes != list(source.classes):
        raise BadInput(f"--checkpoint: {directory} was trained on other classes than {source.name} has")
    cut = cut_again(path, source, data=data, seed=seed, image_size=image_size, images=images)
    return cut.test


def cut_again(
    path: Path, source: LabelledImages, *, data: object, seed: object, image_size: object, images: object
) -> Splits:
    """Cut images as they were cut before, given what a file says of that.

    Args:
        path: of the file, beside a checkpoint.
        source: the images.
        data: the name that they had.
        seed: of the splits.
        image_size: in pixels.
        images: how many there were, by split.

    Raises:
        BadInput: numbers that cannot be, or other images.
    """
    if not (type(seed) is int and 0 <= seed < 2**63):
        raise BadInput(f"--checkpoint: {path} has seed {seed!r:.60}, wants a whole number, 0 or more")
    if not (type(image_size) is int and 0 < image_size**2 <= MOST_PIXELS):
        raise BadInput(f"--checkpoint: {path} has image_size {image_size!r:.60}, wants a positive int")
    if source.name != data:
        raise BadInput(
            f"--checkpoint: {path.parent} was trained on {data!s:.60}, got {source.name}; wants the same images"
        )
    readable = decode(source, image_size, skip_damaged=True)  # as training did, if it had to
    splits = make_splits(readable, split_indices(readable.source, seed))
    if (sizes := _sizes(splits)) != images:
        raise BadInput(f"--checkpoint: {path.parent} had images {images!s:.60}, got {sizes}; wants the same images")
    return splits


def _sizes(splits: Sequence[Split]) -> dict[str, int]:
    return {name: len(split.labels) for name, split in zip(Splits._fields, splits, strict=True)}
