"""``auxhead train``, ``calibrate`` and ``infer``, one after the other, on a folder of images."""

import json
import shutil
from dataclasses import replace

import pytest
from auxhead.model import load_checkpoint, save_checkpoint
from auxhead.model.network.learned_from import hashes_of
from auxhead.model.training.sources import load_source
from PIL import Image
from support.command_line import assert_one_line_error, auxhead
from support.pictures import write_image_folder
from torchvision.models import shufflenet_v2_x0_5

pytestmark = pytest.mark.usefixtures("without_interpreter", "undrawn")

UNKNOWN = "not known what it learned from"


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with pictures and a network that was trained on some of them, calibrated on others."""
    where = tmp_path_factory.mktemp("done")
    write_image_folder(where / "stripes", per_class=90)
    made = auxhead(
        "train", "--backbone", "shufflenet_v2_x0_5", "--data", where / "stripes",
        "--crop", 32, "--epochs", 2, "--seed", 5, "--device", "cpu", "--out", where / "net",
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    assert made.output.count("of the work") > 1, "heads are placed by themselves, and it says where"
    calibrated("net", "stripes", "tuned", where)
    return where


def calibrated(checkpoint, data, out, where, *options):
    """Run the command; returns what it printed and its report."""
    command = ("calibrate", where / checkpoint, "--data", where / data, "--out", where / out)
    result = auxhead(*command, "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    return result.output, json.loads((where / out / "report.json").read_text())


def test_three_commands(done):
    report = json.loads((done / "tuned" / "report.json").read_text())
    assert sum(report["samples"].values()) == 36 and report["left_out"] == 144, "of 180 a fifth was for no training"
    assert report["bound"]["unknown"] is None
    answers = done / "x.jsonl"
    made = auxhead("infer", done / "tuned", done / "stripes" / "lying", "--json", answers)
    assert made.exit_code == 0 and "90 images in" in made.output, made.output
    assert len(answers.read_text().splitlines()) == 90


def test_what_calibrate_wrote_is_calibrated_on_no_image_that_it_learned_from(done):
    first = json.loads((done / "tuned" / "report.json").read_text())
    printed, again = calibrated("tuned", "stripes", "again", done, "--seed", 1)
    assert again["samples"] == first["samples"] and again["left_out"] == 144 and UNKNOWN not in printed
    assert "Left out are 144 samples that it has learned from" in printed and again["accuracy"] == first["accuracy"]


def test_copies_and_other_files_of_the_same_pixels_are_known_to_who_saves_it_from_python(done):
    """In a folder of another name, thrice, as other files, resized and normalised in another way: 36 images are new."""
    for folder in (done / "stripes").iterdir():
        (done / "copies" / folder.name).mkdir(parents=True)
        for file in folder.iterdir():
            shutil.copy(file, done / "copies" / folder.name / f"a{file.name}")
            shutil.copy(file, done / "copies" / folder.name / f"b{file.name}")
            Image.open(file).save(done / "copies" / folder.name / f"c{file.stem}.bmp")
    loaded = load_checkpoint(done / "tuned", shufflenet_v2_x0_5(num_classes=2))
    loaded.network.preprocessing = replace(loaded.preprocessing, crop=48, resize=None, mean=(0.4,) * 3)
    save_checkpoint(
        done / "saved", loaded.network, backbone="torchvision.models:shufflenet_v2_x0_5", classes=loaded.classes,
    )  # fmt: skip
    _, report = calibrated("saved", "copies", "of saved copies", done)
    assert report["left_out"] == 3 * 144 and sum(report["samples"].values()) == 3 * 36
    assert report["bound"]["unknown"] is None


def test_a_training_of_ones_own_on_top_is_not_known(done):
    loaded = load_checkpoint(done / "tuned", shufflenet_v2_x0_5(num_classes=2))
    loaded.network.heads[0].linear.bias.data += 0.01
    save_checkpoint(
        done / "changed", loaded.network, backbone="torchvision.models:shufflenet_v2_x0_5", classes=loaded.classes,
    )  # fmt: skip
    printed, report = calibrated("changed", "stripes", "of changed", done)
    assert UNKNOWN in printed and "have changed since" in report["bound"]["unknown"] and report["left_out"] == 144
    assert "confidence, accuracy on new" not in printed and "nothing was chosen with" not in printed
    assert (
        "not known what it learned from" in json.loads((done / "of changed" / "calibration.json").read_text())["title"]
    )


def test_images_of_which_all_were_learned_from_are_refused(done):
    for folder in (done / "stripes").iterdir():
        (done / "learned" / folder.name).mkdir(parents=True)
    loaded = load_checkpoint(done / "net", shufflenet_v2_x0_5(num_classes=2)).network.learned_from
    source = load_source(done / "stripes")
    known = set(loaded.parts[0].hashes.tolist())
    for path, content in zip(source.paths, hashes_of(path.read_bytes() for path in source.paths).tolist(), strict=True):
        if content in known:
            shutil.copy(path, done / "learned" / path.parent.name / path.name)
    refused = auxhead("calibrate", done / "net", "--data", done / "learned", "--out", done / "none")
    assert_one_line_error(
        refused, "--data: got 0 different samples that it has not learned from, wants at least one for each of"
    )
