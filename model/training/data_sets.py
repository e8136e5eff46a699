"""Labelled images decoded, and split into train, validation and test."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from ..basics.bad_input import BadInput
from ..basics.preprocessing import Preprocessing
from ..network.learned_from import FILE, Samples, hashes_of, identities, short
from .sources import LabelledImages

#: Most memory that decoded images may take; more are refused with advice.
MOST_BYTES = 8 * 2**30


class Split(NamedTuple):
    """Decoded images of one split."""

    pixels: Tensor
    """[M, C, crop, crop] uint8."""
    labels: Tensor
    """[M] int64."""
    indices: Tensor
    """[M] int64: the index of each image among those that were decoded."""
    preprocessing: Preprocessing
    """What has made the pixels, and makes the network's input of them."""
    contents: Tensor | None = None
    """[2, M] int64: of each image a hash of its file's bytes, and one of its pixels in the size that they have there,
    which other files of the same picture share; None of images that are from elsewhere."""

    def samples(self) -> Samples:
        """Return hashes of the images and, for functions that see no files, of what a network is given of them."""
        inputs = short(
            one for chunk in self.pixels.split(256) for one in identities(self.preprocessing.normalised(chunk))
        )
        return Samples([inputs, *([] if self.contents is None else self.contents)], frozenset([FILE]))


class Splits(NamedTuple):
    """Images for training, for choosing thresholds, and for the final evaluation alone."""

    train: Split
    validation: Split
    test: Split


def split_indices(source: LabelledImages, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the indices of the train, validation and test images, each class in the same proportions.

    60, 20 and 20 %, at least one image of every class in each. Splits that are given stay what they are: without one
    for validation that is a tenth of those to train, and half of it is the test where there is no split for that.
    """
    generator = torch.Generator().manual_seed(seed)
    given = torch.zeros_like(source.labels) if source.given is None else source.given
    own = [(given == part).nonzero()[:, 0] for part in range(3)]
    validation_share, test_share = (0.0 if len(own[1]) else 0.1, 0.0) if given.any() else (0.2, 0.2)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [own[1]], [own[2]])
    wanted = 1 + (validation_share > 0.0) + (test_share > 0.0)
    for label, name in enumerate(source.classes):
        of_class = own[0][source.labels[own[0]] == label]
        count = len(of_class)
        if count < wanted:
            each = "one for each split" if wanted > 1 else "to train with"
            raise BadInput(f"--data: class {name!r} has {count} images, wants at least {wanted}, {each}")
        of_class = of_class[torch.randperm(count, generator=generator)]
        validation, test = (max(1, round(count * share)) if share else 0 for share in (validation_share, test_share))
        for part, piece in zip(parts, of_class.split([count - validation - test, validation, test]), strict=True):
            part.append(piece)
    train, validation_indices, test_indices = (torch.cat(part).sort().values for part in parts)
    if not len(test_indices):
        labels = source.labels[validation_indices]
        by_class = [validation_indices[labels == label] for label in range(len(source.classes))]
        drawn = torch.cat([each[torch.randperm(len(each), generator=generator)] for each in by_class])
        if len(drawn) < 2:
            raise BadInput("--data: has one image for validation and none for the test, wants two at least")
        validation_indices, test_indices = (drawn[half::2].sort().values for half in (0, 1))
    return train, validation_indices, test_indices


def decode(
    source: LabelledImages,
    preprocessing: Preprocessing,
    on_image: Callable[[], None] = lambda: None,
    *,
    skip_damaged: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> tuple[LabelledImages, Split, list[str]]:
    """Read every image once and prepare it, but for normalising; ``on_image`` is called after each.

    ``tell`` takes a line about what the crop cuts away, where that is much.

    Returns those that could be read, as one split, too, and of each other one, which ``skip_damaged`` leaves out, file
    and fault. ``BadInput`` for one that cannot be read, or for more of them than fit into ``MOST_BYTES``.
    """
    count, crop = len(source.open), preprocessing.crop
    size = count * preprocessing.channels * crop**2
    if size > MOST_BYTES:
        raise BadInput(
            f"--crop: {count} images of {crop}x{crop} take {size / 2**30:.0f} GiB of memory, wants at most "
            f"{MOST_BYTES / 2**30:.0f}; give a smaller size or fewer images"
        )

    def read(open_it: Callable[[], Image.Image]) -> tuple[Tensor, Tensor] | BadInput:
        try:
            image = open_it()
            sizes.append(image.size)
            return preprocessing.cropped(image), hashes_of([image.tobytes()])
        except BadInput as error:
            if skip_damaged:
                return error
            raise BadInput(f"{error}; --skip-damaged leaves out what cannot be read") from None

    pixels = torch.empty(count, preprocessing.channels, crop, crop, dtype=torch.uint8)
    pictures = torch.empty(count, dtype=torch.int64)
    kept: list[int] = []
    damaged: list[str] = []
    sizes: list[tuple[int, int]] = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # Pillow decodes outside Python's lock
        try:
            for index, image in enumerate(threads.map(read, source.open)):
                if isinstance(image, BadInput):
                    damaged.append(str(image))
                else:
                    pixels[len(kept)], pictures[len(kept)] = image[0], image[1][0]
                    kept.append(index)
                on_image()
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    if not kept:
        raise BadInput(f"--data: of {count} images none can be read: {damaged[0] if damaged else 'there are none'}")
    if cut := preprocessing.cut_away(sizes):
        tell(cut)
    if damaged:
        source = replace(
            source,
            open=[source.open[index] for index in kept],
            labels=source.labels[kept],
            paths=None if source.paths is None else tuple(source.paths[index] for index in kept),
            given=None if source.given is None else source.given[kept],
        )
    pictures = pictures[: len(kept)]
    of_files = pictures if source.paths is None else hashes_of(path.read_bytes() for path in source.paths)
    contents = torch.stack([of_files, pictures])
    indices = torch.arange(len(kept))
    return source, Split(pixels[: len(kept)], source.labels, indices, preprocessing, contents), damaged


def read_splits(
    source: LabelledImages,
    preprocessing: Preprocessing,
    seed: int,
    *,
    skip_damaged: bool = False,
    tell: Callable[[str], object] = lambda lines: None,
    on_image: Callable[[], None] = lambda: None,
) -> tuple[LabelledImages, Splits]:
    """Decode and split the images of a source; returns those that could be read, and their splits.

    ``tell`` takes lines about images that were left out, and what is cut away of others; all else is as in
    :func:`decode` and :func:`split_indices`.
    """
    count = len(source.open)
    split_indices(source, seed)  # refuses a class that is too small before anything is read
    source, whole, damaged = decode(source, preprocessing, on_image, skip_damaged=skip_damaged, tell=tell)
    if damaged:
        tell(describe_damaged(damaged, count))
    assert whole.contents is not None
    return source, Splits(
        *(
            Split(whole.pixels[own], whole.labels[own], own, preprocessing, whole.contents[:, own])
            for own in split_indices(source, seed)
        )
    )


def describe_damaged(damaged: Sequence[str], images: int, most: int = 3) -> str:
    """Say how many images were left out, and name the first few, a line each."""
    lines = [f"Left out {len(damaged):,} of {images:,} images, which cannot be read:", *damaged[:most]]
    return "\n  ".join([*lines, f"and {len(damaged) - most:,} more"] if len(damaged) > most else lines)
