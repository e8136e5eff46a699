"""Labelled images on disk: folders for splits, CSV files, parquet files of Hugging Face, CIFAR; what is refused."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.training.data_sets import decode, split_indices
from auxhead.model.training.sources import LabelledImages, load_source
from PIL import Image
from support.pictures import stripes, whole, write_image_folder


def split_names(source: LabelledImages, seed: int = 0) -> list[list[int]]:
    return [part.tolist() for part in split_indices(source, seed)]


def by_class(source: LabelledImages, indices: list[int]) -> list[int]:
    return torch.bincount(source.labels[indices], minlength=len(source.classes)).tolist()


def test_folders_for_splits_stay_splits(tmp_path: Path) -> None:
    for name, count in (("train", 6), ("val", 4), ("test", 3)):
        write_image_folder(tmp_path / name, per_class=count)
    source = load_source(tmp_path)
    assert source.classes == ("lying", "standing") and len(source.labels) == 26 and source.name == tmp_path.name
    parts = split_names(source)
    for part, name in zip(parts, ("train", "val", "test"), strict=True):
        assert {source.paths[index].parent.parent.name for index in part} == {name}
    assert [len(part) for part in parts] == [12, 8, 6]
    assert all(source.classes[source.labels[index]] == source.paths[index].parent.name for index in range(26))


def test_splits_that_are_not_there_are_drawn_from_those_that_are(tmp_path: Path) -> None:
    """Half of a validation split is the test; a tenth of those to train is for validation."""
    for name, folders in (("two", ("train", "validation")), ("other", ("Train", "test"))):
        for folder in folders:
            write_image_folder(tmp_path / name / folder, per_class=10)
    two, other = load_source(tmp_path / "two"), load_source(tmp_path / "other")
    train, validation, test = split_names(two)
    assert [by_class(two, part) for part in (train, validation, test)] == [[10, 10], [5, 5], [5, 5]]
    assert {two.paths[index].parent.parent.name for index in train} == {"train"}
    assert sorted(train + validation + test) == [*range(40)]
    assert split_names(two) == [train, validation, test] != split_names(two, seed=1)
    assert [by_class(other, part) for part in split_names(other)] == [[9, 9], [1, 1], [10, 10]]


def test_folders_for_splits_that_do_not_go_together(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "none" / "val", per_class=1)
    write_image_folder(tmp_path / "none" / "test", per_class=1)
    with pytest.raises(BadInput, match="--data: .*none has the folders test, val, wants train, val and test"):
        load_source(tmp_path / "none")
    for name in ("train", "val"):
        write_image_folder(tmp_path / "more" / name, per_class=1)
    (tmp_path / "more" / "val" / "upside down").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "more" / "val" / "upside down" / "x.png")
    with pytest.raises(BadInput, match="--data: .*val has 'upside down', which is no class of those to train"):
        load_source(tmp_path / "more")


def test_folders_beside_those_for_splits(tmp_path: Path) -> None:
    """They would be classes, whose images are those of all splits; hidden ones are no one's."""
    for name in ("train", "val"):
        write_image_folder(tmp_path / name, per_class=4)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert load_source(tmp_path).classes == ("lying", "standing")
    write_image_folder(tmp_path / "extra", per_class=1)
    with pytest.raises(BadInput, match="--data: .* has the folders extra, train, val, wants train, val and test alone"):
        load_source(tmp_path)


def test_a_split_of_folders_without_images(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "train", per_class=5)
    for name in ("lying", "standing"):
        (tmp_path / "val" / name).mkdir(parents=True)
    source = load_source(tmp_path)
    assert source.labels.dtype == torch.int64 and [len(part) for part in split_names(source)] == [6, 2, 2]


def test_one_image_a_class_for_validation_is_shared_with_the_test(tmp_path: Path) -> None:
    write_image_folder(tmp_path / "train", per_class=5)
    write_image_folder(tmp_path / "val", per_class=1)
    assert [len(part) for part in split_names(load_source(tmp_path))] == [10, 1, 1]
    next((tmp_path / "val").glob("*/*.png")).unlink()
    with pytest.raises(BadInput, match="--data: has one image for validation and none for the test, wants two"):
        split_names(load_source(tmp_path))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A folder of four pictures, to be listed."""
    generator = np.random.default_rng(0)
    for number in range(4):
        stripes(number % 2, 16, generator).save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_csv_file_lists_paths_and_labels(table: Path, delimiter: str) -> None:
    parts = ("train", "val", "test", "train")
    rows = [("split", "Label", "Path", "more"), *((parts[at], f"{10 - at}", f"{at}.png", "a b") for at in range(4))]
    file = table / "list.csv"
    file.write_text("\n".join(delimiter.join(row) for row in rows), encoding="utf-8-sig")
    source = load_source(file)
    assert source.classes == ("7", "8", "9", "10"), "numbers in their order"
    assert source.labels.tolist() == [3, 2, 1, 0] and source.given.tolist() == [0, 1, 2, 0] and source.name == "list"
    pixels = decode(source, whole(16))[1].pixels
    for number, one in enumerate(pixels):
        assert torch.equal(one, whole(16).cropped(Image.open(table / f"{number}.png")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2", "list.csv has the columns a, b, wants one of path, file, filename, "),
        ("path\nx.png", "list.csv has the columns path, wants one of label, labels, class"),
        ("path,label\nx.png,", "line 2 of .*list.csv has no label"),
        ("path,label\nx.png", "line 2 of .*list.csv has no label"),
        ("path,label,split\nx.png,a,train\ny.png,a,later", "line 3 of .*list.csv has the split 'later', wants train"),
        ("", "list.csv has the columns none, wants one of"),
        ("path,label", "list.csv lists no images"),
        ("path,label,Label\nx.png,a,b", "list.csv has a column twice: path, label, Label; wants each once"),
        ("path,label\na,x/0.png,a", "line 2 of .*list.csv has more cells than the header; wants commas in quotes"),
        ("path,label\nx.png,a\ny.png,a\nx.png,b", "line 4 of .*list.csv has the image of line 2; wants each once"),
    ],
)
def test_csv_files_that_list_no_images(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "list.csv").write_text(text)
    with pytest.raises(BadInput, match=f"^--data: .*{message}"):
        load_source(tmp_path / "list.csv")
    (tmp_path / "list.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match="list.csv cannot be read as CSV"):
        load_source(tmp_path / "list.csv")


def png(number: int) -> bytes:
    content = io.BytesIO()
    stripes(number % 2, 16, np.random.default_rng(number)).save(content, "PNG")
    return content.getvalue()


def write_parquet(folder: Path, features: bool = True, **files: list[int]) -> Path:
    """As ``datasets`` writes them: the images' bytes in a struct, names of classes in the metadata."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    said = {"image": {"_type": "Image"}, "kind": {"_type": "ClassLabel", "names": ["standing", "lying"]}}
    folder.mkdir(parents=True)
    for name, numbers in files.items():
        cells = [{"bytes": png(number), "path": f"{number}.png"} for number in numbers]
        column = "kind" if features else "label"
        found = pyarrow.table({"image": cells, column: [number % 2 for number in numbers]})
        if features:
            found = found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": said}})})
        parquet.write_table(found, folder / f"{name}-00000-of-00001.parquet")
    return folder


def test_parquet_files_of_hugging_face(tmp_path: Path) -> None:
    write_parquet(tmp_path / "set" / "data", train=[0, 1, 2, 3], test=[4, 5])
    source = load_source(tmp_path / "set")
    assert source.classes == ("standing", "lying") and source.name == "set"
    pixels = decode(source, whole(16))[1].pixels
    order = [4, 5, 0, 1, 2, 3]  # of the files' names
    assert source.labels.tolist() == [number % 2 for number in order] and source.given.tolist() == [2, 2, 0, 0, 0, 0]
    for number, one in zip(order, pixels, strict=True):
        assert torch.equal(one, whole(16).cropped(Image.open(io.BytesIO(png(number)))))
    one = load_source(tmp_path / "set" / "data" / "train-00000-of-00001.parquet")
    assert len(one.labels) == 4 and one.given is None
    plain = load_source(write_parquet(tmp_path / "plain", features=False, all=[0, 1, 2]))
    assert plain.classes == ("0", "1") and plain.labels.tolist() == [0, 1, 0] and plain.given is None


def test_parquet_files_that_hold_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(BadInput, match="^--data: .* cannot be read as parquet"):
        load_source(tmp_path / "x.parquet")
    parquet.write_table(pyarrow.table({"text": ["a"], "label": [0]}), tmp_path / "x.parquet")
    with pytest.raises(BadInput, match="^--data: .*x.parquet has the columns text, label, wants one of image"):
        load_source(tmp_path / "x.parquet")
    parquet.write_table(pyarrow.table({"image": ["a"], "label": [-1]}), tmp_path / "x.parquet")
    with pytest.raises(BadInput, match="has images without a label, or none; wants one for"):
        load_source(tmp_path / "x.parquet")
    parquet.write_table(pyarrow.table({"image": [None, b"x"], "label": [0, 1]}), tmp_path / "x.parquet")
    source = load_source(tmp_path / "x.parquet")
    with pytest.raises(BadInput, match="x.parquet, row 0: has no bytes of an image"):
        source.open[0]()
    with pytest.raises(BadInput, match="x.parquet, row 1: cannot be read as an image .its format is not known"):
        source.open[1]()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BadInput, match="^--data: parquet files want pyarrow, which is not installed: pip install"):
        load_source(tmp_path / "x.parquet")


def test_parquet_files_that_do_not_go_together(tmp_path: Path) -> None:
    """Names of classes in another order, files of no split, labels that are no class."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(name: str, names: list[str], labels: list[object], more: dict | None = None) -> None:
        said = {"boxes": [{"x": 1}], "kind": {"_type": "ClassLabel", "names": names}, **(more or {})}
        cells = [{"bytes": png(number)} for number in range(len(labels))]
        table = pyarrow.table({"boxes": [1] * len(labels), "image": cells, "kind": labels})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": said}})})
        parquet.write_table(table, tmp_path / f"{name}.parquet")

    write("train", ["a", "b"], [0, 1])
    assert load_source(tmp_path).classes == ("a", "b"), "a list among the features is no matter"
    write("test", ["b", "a"], [0, 1])
    with pytest.raises(BadInput, match="train.parquet has other columns than .*test.parquet, wants the files of one"):
        load_source(tmp_path)
    write("test", ["a", "b"], [0, 1])
    write("unsupervised", ["a", "b"], [0, 1])
    with pytest.raises(BadInput, match="of the files of .* unsupervised.parquet is of no split; wants train, valid"):
        load_source(tmp_path)
    for labels, said in (([0, 2], "2"), ([0.0, 1.5], "0.0"), (["a", "b"], "'a'")):
        write("alone", ["a", "b"], labels)
        with pytest.raises(BadInput, match=f"has the label {said}, wants 0 to 1"):
            load_source(tmp_path / "alone.parquet")
    write("alone", [], [])
    with pytest.raises(BadInput, match="has images without a label, or none; wants one for each"):
        load_source(tmp_path / "alone.parquet")


def test_a_folder_of_cifar_that_is_damaged(tmp_path: Path) -> None:
    for folder, name in (("cifar-10-batches-py", "CIFAR-10"), ("cifar-100-python", "CIFAR-100")):
        (tmp_path / name / folder).mkdir(parents=True)
        for where in (tmp_path / name, tmp_path / name / folder):
            with pytest.raises(BadInput, match=f"--data: .*{folder} is not {name} .*; wants what the archive of its"):
                load_source(where)
