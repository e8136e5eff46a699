"""Data sets of images: the digits, CIFAR-10 or a folder; decoded and split into train, validation and test."""

import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..basics.bad_input import BadInput
from ..basics.images import open_image, to_rgb
from ..basics.preprocessing import Preprocessing
from ..network.learned_from import FILE, Samples, hashes_of, identities, short

#: Most memory that decoded images may take; more are refused with advice.
MOST_BYTES = 8 * 2**30

#: Names of folders that are splits, not classes.
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test", "testing", "eval"}


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes, not yet decoded."""

    name: str
    """The data set's name in reports."""
    open: Sequence[Callable[[], Image.Image]]
    """For each image a function that reads it as RGB."""
    labels: Tensor
    """[M] int64."""
    classes: tuple[str, ...]
    paths: tuple[Path, ...] | None = None
    """The image files; None for images that come in arrays."""
    test_from: int | None = None
    """Index of the first image of a given test split, which lasts to the end; None: a test split is drawn."""

    def contents(self) -> Tensor:
        """Return of each image a hash of its file's bytes, or of its pixels where it comes in an array, [M] int64."""
        if self.paths is None:
            return hashes_of(open_it().tobytes() for open_it in self.open)
        return hashes_of(path.read_bytes() for path in self.paths)

    def facts(self) -> str:
        """Return the number of images, and a hash of names, sizes on disk, labels and classes, to agree on."""
        found = hashlib.sha256(repr(self.classes).encode())
        found.update(self.labels.numpy().tobytes())
        for path in self.paths or ():
            found.update(f"{path.parent.name}/{path.name} {path.stat().st_size}\n".encode())
        return f"{len(self.labels)} images of {self.name} ({found.hexdigest()[:16]})"


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


def load_source(data: Path | None, dataset: str | None, root: Path | None) -> LabelledImages:
    """Return the images that the options ``--data``, ``--dataset`` and ``--root`` ask for; the digits by default."""
    if data is not None:
        if dataset is not None or root is not None:
            raise BadInput("--data: cannot be given together with --dataset or --root; wants one source")
        return load_folder(data)
    if dataset is None and root is None or dataset == "digits":
        if root is not None:
            raise BadInput("--root: the digits need none; it belongs to --dataset cifar10")
        return load_digits()
    if dataset != "cifar10":
        got = "--root without --dataset" if dataset is None else repr(dataset)
        raise BadInput(f"--dataset: got {got}, wants 'digits' or 'cifar10'")
    if root is None:
        raise BadInput("--root: missing; --dataset cifar10 wants the directory that holds cifar-10-batches-py")
    return load_cifar10(root)


def load_digits() -> LabelledImages:
    """Return scikit-learn's 1,797 handwritten digits (8x8, white on black), which ship inside the package."""
    try:
        from sklearn.datasets import load_digits as sklearn_digits
    except ImportError:
        raise BadInput(
            "the digits come with scikit-learn, which is not installed: pip install 'auxhead[demo]' "
            "(or give your own images with --data DIR)"
        ) from None
    digits = sklearn_digits()
    grey = np.rint(digits.images * (255.0 / 16.0)).astype(np.uint8)  # [M, 8, 8], from 0..16
    return LabelledImages(
        name="scikit-learn digits",
        open=[partial(_open_array, array) for array in grey],
        labels=torch.from_numpy(digits.target).long(),
        classes=tuple(str(digit) for digit in range(10)),
    )


def load_folder(directory: Path, name: str = "--data") -> LabelledImages:
    """Return the images below a directory that has one folder a class, as ``torchvision.datasets.ImageFolder`` does."""
    from torchvision.datasets import ImageFolder

    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise BadInput(f"{name}: {directory} {what}, wants a directory with one folder of images a class")
    folders = sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    if len(folders) < 2:
        found = f"only the folder {folders[0]!r}" if folders else "no folders"
        raise BadInput(f"{name}: {directory} has {found}, wants at least two, one of images a class")
    if _SPLIT_NAMES.issuperset(folder.lower() for folder in folders):
        raise BadInput(
            f"{name}: the folders {', '.join(folders)} of {directory} look like splits, wants one folder a class; "
            f"give {directory / folders[0]}, say: splits are drawn from it"
        )
    found = ImageFolder(directory, allow_empty=True)
    paths = tuple(Path(path) for path, _ in found.samples)
    return LabelledImages(
        name=directory.resolve().name,
        open=[partial(open_image, path) for path in paths],
        labels=torch.tensor(found.targets, dtype=torch.int64),
        classes=tuple(found.classes),
        paths=paths,
    )


def load_cifar10(root: Path) -> LabelledImages:
    """Return CIFAR-10 from files that are already there, by torchvision's loader; its test split stays the test split.

    The files are pickles. The loader opens none before all have the checksums of those that the data set's authors
    published, so that no others are unpickled.
    """
    from torchvision.datasets import CIFAR10

    try:
        parts = [CIFAR10(str(root), train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise BadInput(
            f"--root: {root} does not hold CIFAR-10 ({' '.join(str(error).split())}); wants the directory that holds "
            "cifar-10-batches-py, unpacked from cifar-10-python.tar.gz; nothing is downloaded"
        ) from None
    arrays = np.concatenate([part.data for part in parts])  # [M, 32, 32, 3] uint8
    return LabelledImages(
        name="CIFAR-10",
        open=[partial(_open_array, array) for array in arrays],
        labels=torch.tensor([label for part in parts for label in part.targets], dtype=torch.int64),
        classes=tuple(parts[0].classes),
        test_from=len(parts[0].data),
    )


def _open_array(array: np.ndarray) -> Image.Image:
    return to_rgb(Image.fromarray(array))


def split_indices(source: LabelledImages, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the indices of the train, validation and test images, each class in the same proportions.

    60, 20 and 20 %, at least one image of every class in each. Where the test split is given, a tenth of the rest is
    for validation.
    """
    generator = torch.Generator().manual_seed(seed)
    given = source.test_from is not None
    indices = torch.arange(len(source.labels))
    drawn_from = indices[: source.test_from] if given else indices
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    wanted = 2 if given else 3
    for label, name in enumerate(source.classes):
        own = drawn_from[source.labels[drawn_from] == label]
        count = len(own)
        if count < wanted:
            raise BadInput(f"--data: class {name!r} has {count} images, wants at least {wanted}, one for each split")
        own = own[torch.randperm(count, generator=generator)]
        validation = max(1, round(count * (0.1 if given else 0.2)))
        test = 0 if given else max(1, round(count * 0.2))
        for part, piece in zip(parts, own.split([count - validation - test, validation, test]), strict=True):
            part.append(piece)
    train, validation_indices, test_indices = (torch.cat(part).sort().values for part in parts)
    return train, validation_indices, indices[source.test_from :] if given else test_indices


def decode(
    source: LabelledImages,
    preprocessing: Preprocessing,
    on_image: Callable[[], None] = lambda: None,
    *,
    skip_damaged: bool = False,
) -> tuple[LabelledImages, Split, list[str]]:
    """Read every image once and prepare it, but for normalising; ``on_image`` is called after each.

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
            return preprocessing.cropped(image), hashes_of([image.tobytes()])
        except BadInput as error:
            if skip_damaged:
                return error
            raise BadInput(f"{error}; --skip-damaged leaves out what cannot be read") from None

    pixels = torch.empty(count, preprocessing.channels, crop, crop, dtype=torch.uint8)
    pictures = torch.empty(count, dtype=torch.int64)
    kept: list[int] = []
    damaged: list[str] = []
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
    if damaged:
        source = replace(
            source,
            open=[source.open[index] for index in kept],
            labels=source.labels[kept],
            paths=None if source.paths is None else tuple(source.paths[index] for index in kept),
            test_from=None if source.test_from is None else bisect_left(kept, source.test_from),
        )
    contents = torch.stack([source.contents(), pictures[: len(kept)]])
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

    ``tell`` takes lines about images that were left out; all else is as in :func:`decode` and :func:`split_indices`.
    """
    count = len(source.open)
    split_indices(source, seed)  # refuses a class that is too small before anything is read
    source, whole, damaged = decode(source, preprocessing, on_image, skip_damaged=skip_damaged)
    if damaged:
        tell(_describe_damaged(damaged, count))
    assert whole.contents is not None
    return source, Splits(
        *(
            Split(whole.pixels[own], whole.labels[own], own, preprocessing, whole.contents[:, own])
            for own in split_indices(source, seed)
        )
    )


def _describe_damaged(damaged: Sequence[str], images: int, most: int = 3) -> str:
    """Say how many images were left out, and name the first few, a line each."""
    lines = [f"Left out {len(damaged):,} of {images:,} images, which cannot be read:", *damaged[:most]]
    return "\n  ".join([*lines, f"and {len(damaged) - most:,} more"] if len(damaged) > most else lines)
