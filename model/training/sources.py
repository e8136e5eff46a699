"""``load_source``: labelled images on disk, not yet decoded: folders, a CSV file, parquet files, CIFAR, the digits."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..basics.bad_input import BadInput, one_line
from ..basics.images import open_image, to_rgb

#: Names of folders, files and values that are splits, by the index in ``Splits`` that they stand for.
_SPLITS = {
    "train": 0, "training": 0,
    "val": 1, "valid": 1, "validation": 1, "dev": 1,
    "test": 2, "testing": 2, "eval": 2,
}  # fmt: skip
#: Names of columns of a CSV file, or of parquet files without features of Hugging Face, in the order of preference.
_PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
_LABELS = ("label", "labels", "class", "category", "target", "fine_label")
_PARTS = ("split", "set", "subset", "fold")
#: Archives of CIFAR by the folder that they unpack to: torchvision's class, and what people call it.
_CIFAR = {"cifar-10-batches-py": ("CIFAR10", "CIFAR-10"), "cifar-100-python": ("CIFAR100", "CIFAR-100")}


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
    """The image files; None for images that come in arrays or in files of many."""
    given: Tensor | None = None
    """[M] int64: the index in ``Splits`` of the split that each image is given for; None: splits are drawn."""
    fills: bool = False
    """True if what there is to see fills each picture, of which nothing is to be cropped."""

    def facts(self) -> str:
        """Return the number of images, and a hash of names, sizes on disk, labels and classes, to agree on."""
        found = hashlib.sha256(repr(self.classes).encode())
        found.update(self.labels.numpy().tobytes())
        for path in self.paths or ():
            size = path.stat().st_size if path.exists() else None
            found.update(f"{path.parent.name}/{path.name} {size}\n".encode())
        return f"{len(self.labels)} images of {self.name} ({found.hexdigest()[:16]})"


def load_source(data: Path | None, option: str = "--data") -> LabelledImages:
    """Return the images that an option names, by what lies there; the digits where it is not given.

    A folder with one folder of images a class, as ``torchvision.datasets.ImageFolder`` takes it; or with folders train,
    val and test of such; a CSV file of paths and labels; a folder of a Hugging Face data set's parquet files, or one of
    them; or the folder that holds CIFAR-10 or CIFAR-100.

    Raises:
        BadInput: there is nothing like that; names the option.
    """
    if data is None:
        return load_digits()
    if not data.exists():
        raise BadInput(
            f"{option}: {data} does not exist, wants a directory of images by class, or a CSV or parquet file"
        )
    if data.suffix.lower() in (".csv", ".tsv"):
        return _load_csv(data, option)
    if data.suffix.lower() == ".parquet":
        return _load_parquet([data], data.stem, option)
    if not data.is_dir():
        raise BadInput(f"{option}: {data} is not a directory, wants one of images by class, or a CSV or parquet file")
    for folder in _CIFAR:
        if (data / folder).is_dir() or data.resolve().name == folder:
            return _load_cifar(data if (data / folder).is_dir() else data.resolve().parent, folder, option)
    if files := sorted([*data.glob("*.parquet"), *data.glob("data/*.parquet")]):
        return _load_parquet(files, data.resolve().name, option)
    return _load_folder(data, option)


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
        fills=True,
    )


def _load_folder(directory: Path, option: str) -> LabelledImages:
    """Return the images below a folder: of one folder a class, or of such folders for each split."""
    folders = sorted(entry.name for entry in directory.iterdir() if entry.is_dir() and entry.name[0] != ".")
    others = [name for name in folders if name.lower() not in _SPLITS]
    if others and "train" in map(str.lower, folders) and len(others) < len(folders) - 1:
        wants = "wants train, val and test alone, or one folder a class"
        raise BadInput(f"{option}: {directory} has the folders {', '.join(folders):.100}, {wants}")
    if len(folders) > 1 and not others:
        parts = [_load_folder(directory / name, f"{option}: of {name}") for name in folders]
        indices = [_SPLITS[name.lower()] for name in folders]
        if 0 not in indices or len({*indices}) < len(indices):
            raise BadInput(f"{option}: {directory} has the folders {', '.join(folders)}, wants train, val and test")
        classes = parts[indices.index(0)].classes
        for name, part in zip(folders, parts, strict=True):
            if other := {*part.classes} - {*classes}:
                raise BadInput(f"{option}: {directory / name} has {min(other)!r}, which is no class of those to train")
        numbers = [[classes.index(part.classes[label]) for label in part.labels] for part in parts]
        of_parts = [torch.tensor(of_part, dtype=torch.int64) for of_part in numbers]
        paths = tuple(path for part in parts for path in part.paths or ())
        given = torch.cat([torch.full_like(each, index) for each, index in zip(of_parts, indices, strict=True)])
        return _of_paths(directory.resolve().name, paths, torch.cat(of_parts), classes, given)
    if len(folders) < 2:
        found = f"only the folder {folders[0]!r}" if folders else "no folders"
        raise BadInput(f"{option}: {directory} has {found}, wants at least two, one of images a class")
    from torchvision.datasets import ImageFolder

    found_below = ImageFolder(directory, allow_empty=True)
    paths = tuple(Path(path) for path, _ in found_below.samples)
    labels = torch.tensor(found_below.targets, dtype=torch.int64)
    return _of_paths(directory.resolve().name, paths, labels, tuple(found_below.classes))


def _of_paths(
    name: str, paths: tuple[Path, ...], labels: Tensor, classes: tuple[str, ...], given: Tensor | None = None
) -> LabelledImages:
    return LabelledImages(name, [partial(open_image, path) for path in paths], labels, classes, paths, given)


def _load_csv(file: Path, option: str) -> LabelledImages:
    """Return the images of a table with a header: paths, beside the file or absolute, labels, and maybe splits."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            header = lines.readline()
            lines.seek(0)
            delimiter = max(",;\t", key=header.count)
            table = csv.DictReader(lines, delimiter=delimiter)
            rows = [(table.line_num, row) for row in table]
            columns = [str(name) for name in table.fieldnames or ()]
    except (OSError, UnicodeError, csv.Error) as error:
        raise BadInput(f"{option}: {file} cannot be read as CSV ({one_line(error)})") from None
    if len({name.strip().lower() for name in columns}) < len(columns):
        raise BadInput(f"{option}: {file} has a column twice: {', '.join(columns):.100}; wants each once")
    path_in, label_in = (_column(file, columns, names, option) for names in (_PATHS, _LABELS))
    part_in = next((name for name in columns if name.strip().lower() in _PARTS), None)
    listed: dict[Path, int] = {}
    for number, row in rows:
        if None in row:
            raise BadInput(f"{option}: line {number} of {file} has more cells than the header; wants commas in quotes")
        for name in (path_in, label_in):
            if not (row[name] or "").strip():
                raise BadInput(f"{option}: line {number} of {file} has no {name}")
        path = file.parent / row[path_in].strip()
        if (before := listed.setdefault(path, number)) != number:  # which would be trained on and tested with
            raise BadInput(f"{option}: line {number} of {file} has the image of line {before}; wants each once")
    if not rows:
        raise BadInput(f"{option}: {file} lists no images")
    paths = tuple(listed)
    labels, classes = _numbered([row[label_in].strip() for _, row in rows])
    given = None
    if part_in is not None:
        for number, row in rows:
            if (row[part_in] or "").strip().lower() not in _SPLITS:
                wants = "wants train, val or test"
                raise BadInput(f"{option}: line {number} of {file} has the {part_in} {row[part_in]!r:.60}, {wants}")
        given = torch.tensor([_SPLITS[row[part_in].strip().lower()] for _, row in rows], dtype=torch.int64)
    return _of_paths(file.stem, paths, labels, classes, given)


def _column(file: Path, columns: Sequence[str], names: Sequence[str], option: str) -> str:
    by_name = {name.strip().lower(): name for name in reversed(columns)}
    found = next((by_name[name] for name in names if name in by_name), None)
    if found is None:
        has = ", ".join(columns) or "none"
        raise BadInput(f"{option}: {file} has the columns {has:.100}, wants one of {', '.join(names)}")
    return found


def _numbered(names: Sequence[Any]) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels [M] int64 and their names in order: of whole numbers as numbers, of all others as text."""
    texts = [str(name) for name in names]
    are_numbers = all(re.fullmatch(r"\d{1,9}", text) for text in texts)
    classes = tuple(sorted({*texts}, key=(lambda text: (int(text), text)) if are_numbers else None))
    number = {name: index for index, name in enumerate(classes)}
    return torch.tensor([number[text] for text in texts], dtype=torch.int64), classes


def _load_parquet(files: Sequence[Path], name: str, option: str) -> LabelledImages:
    """Return the images of parquet files: of each row one, encoded, in a column that has its bytes, and its label.

    Of a Hugging Face data set names of classes are in the file, and splits in the names of the files.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise BadInput(
            f"{option}: parquet files want pyarrow, which is not installed: pip install 'auxhead[parquet]'"
        ) from None
    try:
        tables = [parquet.read_table(file) for file in files]
    except (OSError, ValueError) as error:  # pyarrow's own are of these
        raise BadInput(f"{option}: {files[0].parent} cannot be read as parquet ({one_line(error)})") from None
    schema = tables[0].schema
    features = _features(schema)
    for file, table in zip(files, tables, strict=True):
        if table.schema.names != schema.names or _features(table.schema) != features:
            raise BadInput(f"{option}: {file} has other columns than {files[0]}, wants the files of one data set")
    of_kind = {str(feature.get("_type")): one for one, feature in reversed(features.items())}
    image = of_kind.get("Image") or _column(files[0], schema.names, ("image", "img", "picture", "bytes"), option)
    label = of_kind.get("ClassLabel") or _column(files[0], schema.names, _LABELS, option)
    values = [value for table in tables for value in table[label].to_pylist()]
    classes = tuple(str(name) for name in features.get(label, {}).get("names") or ())
    if any(value is None or value == -1 for value in values) or not values:
        raise BadInput(f"{option}: {files[0].parent} has images without a label, or none; wants one for each")
    for value in values if classes else ():
        if type(value) is not int or not 0 <= value < len(classes):
            raise BadInput(f"{option}: {files[0].parent} has the label {value!r:.60}, wants 0 to {len(classes) - 1}")
    if classes:
        labels = torch.tensor(values, dtype=torch.int64)
    else:
        labels, classes = _numbered(values)
    opens = [
        partial(_open_cell, table[image], row, f"{file}, row {row}")
        for file, table in zip(files, tables, strict=True)
        for row in range(len(table))
    ]
    parts = [re.match(r"[a-z]+", file.name.lower()) for file in files]
    known = [_SPLITS.get(part.group()) if part else None for part in parts]
    given = None
    if None in known and len({*known}) > 1:
        other = files[known.index(None)].name
        raise BadInput(
            f"{option}: of the files of {name} {other} is of no split; wants train, validation and test alone"
        )
    if 0 in known and len({*known}) > 1:
        counts = [len(table) for table in tables]
        given = torch.tensor(known, dtype=torch.int64).repeat_interleave(torch.tensor(counts))
    return LabelledImages(name, opens, labels, classes, given=given)


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """Return the features of a Hugging Face data set by column; none where the file has none."""
    try:
        found = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in found.items() if name in schema.names and isinstance(feature, dict)}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}


def _open_cell(column: Any, row: int, name: str) -> Image.Image:
    value = column[row].as_py()
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise BadInput(f"{name}: has no bytes of an image")
    return open_image(io.BytesIO(content), name)


def _load_cifar(root: Path, folder: str, option: str) -> LabelledImages:
    """Return CIFAR from files that are already there, by torchvision's loader; its test split stays the test split.

    The files are pickles. The loader opens none before all have the checksums of those that the data set's authors
    published, so that no others are unpickled.
    """
    from torchvision import datasets

    kind, name = _CIFAR[folder]
    try:
        parts = [getattr(datasets, kind)(str(root), train=train, download=False) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        raise BadInput(
            f"{option}: {root / folder} is not {name} ({one_line(error)}); wants what the archive of its authors "
            "unpacks to; nothing is downloaded"
        ) from None
    arrays = np.concatenate([part.data for part in parts])  # [M, 32, 32, 3] uint8
    given = torch.zeros(len(arrays), dtype=torch.int64)
    given[len(parts[0].data) :] = 2
    return LabelledImages(
        name=name,
        open=[partial(_open_array, array) for array in arrays],
        labels=torch.tensor([label for part in parts for label in part.targets], dtype=torch.int64),
        classes=tuple(parts[0].classes),
        given=given,
        fills=True,
    )


def _open_array(array: np.ndarray) -> Image.Image:
    return to_rgb(Image.fromarray(array))
