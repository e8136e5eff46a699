"""``auxhead train``, ``calibrate`` and ``infer``, one after the other, on a folder of images."""

import json

import pytest
import torch
from auxhead.model.bad_input import BadInput
from auxhead.model.training.data_sets import load_folder, read_splits
from auxhead.model.training.split_record import FILE, unseen_split, write_split_record
from support.command_line import assert_one_line_error, auxhead
from support.pictures import write_image_folder

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_image_folder(tmp_path_factory.mktemp("pictures") / "stripes", per_class=90)


@pytest.fixture
def split(pictures):
    source = load_folder(pictures)
    return read_splits(source, 16, 3, skip_damaged=False, tell=print, on_image=lambda: None)


def test_three_commands(pictures, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = auxhead(
        "train", "--backbone", "shufflenet_v2_x0_5", "--data", pictures,
        "--image-size", 32, "--epochs", 2, "--seed", 5, "--device", "cpu", "--out", "net",
    )  # fmt: skip
    assert done.exit_code == 0 and f"{FILE} (the splits)" in done.output, done.output
    assert done.output.count("of the work") > 1, "heads are placed by themselves, and it says where"
    done = auxhead("calibrate", "--checkpoint", "net", "--data", pictures, "--device", "cpu", "--out", "tuned")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "tuned" / "report.json").read_text())
    assert sum(report["samples"].values()) == len(unseen_split(tmp_path / "net", load_folder(pictures)).labels) == 36
    done = auxhead("infer", pictures / "lying", "--checkpoint", "tuned", "--json", "x.jsonl", "--device", "cpu")
    assert done.exit_code == 0 and "90 images in" in done.output, done.output
    assert len((tmp_path / "x.jsonl").read_text().splitlines()) == 90
    other = write_image_folder(tmp_path / "others", per_class=12)
    refused = auxhead("calibrate", "--checkpoint", "net", "--data", other, "--device", "cpu", "--out", "again")
    assert_one_line_error(refused, "--checkpoint: net was trained on stripes, got others; wants the same images")
    refused = auxhead(
        "calibrate", "--checkpoint", "net", "--data", pictures, "--train-data", other, "--device", "cpu", "--out", "x"
    )
    assert_one_line_error(refused, "--train-data: of checkpoints of `auxhead demo` and `train` the training images are")


def test_the_split_is_that_of_training(split, pictures, tmp_path):
    source, splits = split
    write_split_record(tmp_path, source, splits, seed=3, image_size=16)
    found = unseen_split(tmp_path, load_folder(pictures))
    assert torch.equal(found.pixels, splits.test.pixels) and torch.equal(found.labels, splits.test.labels)


def test_without_a_record_nobody_knows(pictures, tmp_path):
    assert unseen_split(tmp_path, load_folder(pictures)) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": "auxhead training 9"}, "has format 'auxhead training 9', wants 'auxhead training 1'"),
        ({"data": "cats"}, "was trained on cats, got stripes; wants the same images"),
        ({"classes": ["lying"]}, "was trained on other classes than stripes has"),
        ({"seed": -1}, "has seed -1, wants a whole number"),
        ({"images": {"train": 1, "validation": 1, "test": 1}}, "had images {'train': 1"),
        ({"seed": None}, "has seed None"),
        ({"image_size": "16"}, "has image_size '16', wants a positive int"),
    ],
)
def test_records_of_something_else_are_refused(split, pictures, tmp_path, change, message):
    source, splits = split
    write_split_record(tmp_path, source, splits, seed=3, image_size=16)
    record = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**record, **change}))
    with pytest.raises(BadInput, match="^--checkpoint: ") as refused:
        unseen_split(tmp_path, load_folder(pictures))
    assert message in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "no JSON"])
def test_damaged_records_are_refused(text, pictures, tmp_path):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(BadInput, match=r"^--checkpoint: .* is no record of `auxhead train`"):
        unseen_split(tmp_path, load_folder(pictures))
