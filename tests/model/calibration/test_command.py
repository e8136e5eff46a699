"""``auxhead calibrate``: what it writes and leaves out, and how it refuses."""

import json
import shutil

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, load_checkpoint, save_checkpoint
from auxhead.model.network.learned_from import LearnedFrom, Samples, fingerprint
from support.checkpoint_files import weights_of
from support.command_line import assert_one_line_error, auxhead, plot
from support.pictures import whole, write_image_folder
from support.replica_cases import OWN, train_on_stripes

pytestmark = pytest.mark.usefixtures("without_interpreter", "undrawn")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    folder, scope = tmp_path_factory.mktemp("made"), {}
    (folder / "own_stripes.py").write_text(OWN)
    write_image_folder(folder / "pictures", per_class=120)
    exec(OWN, scope)
    network = EarlyExitNetwork(scope["make"](), {"0": FusedAuxHead(8, 2)})
    train_on_stripes(network, steps=40)
    network.preprocessing = whole(16)
    save_checkpoint(folder / "own", network.eval(), backbone="own_stripes:make", classes=CLASSES)
    return folder


@pytest.fixture
def own(made_once, users_folder):
    """A checkpoint of a network that tells stripes apart by their first convolution, and pictures of them."""
    shutil.copytree(made_once, users_folder, dirs_exist_ok=True)
    return users_folder


def calibrated(own, *options, out="new"):
    """Run the command; returns what it printed, and its report."""
    result = auxhead(*ARGUMENTS, "--data", "pictures", *options, "--out", out)
    assert result.exit_code == 0, result.output
    return result.output, json.loads((own / out / "report.json").read_text())


CLASSES = ("lying", "standing")
ARGUMENTS = ("calibrate", "own", "--backbone", "own_stripes:make", "--device", "cpu")


def test_a_checkpoint_of_ones_own_is_calibrated(own):
    printed, report = calibrated(own, "--max-accuracy-drop", 0.05, "--batch", 2)
    files = {"calibration.json", "calibration.png", "calibration.svg", "model.json", "report.json"}
    assert {path.name for path in (own / "new").iterdir()} == {*files, weights_of(own / "new").name}
    assert report["samples"] == {"temperature": 48, "thresholds": 120, "test": 72} and report["data"] == "pictures"
    assert report["bound"]["reachable"] and report["exits"][0]["share"] > 0.5
    assert [row["name"] for row in report["classes"]] == list(CLASSES) and "Test split by class" in printed
    assert sum(row["samples"] for row in report["classes"]) == 72
    assert report["latencies"]["batch_size"] == 2 and report["expected_latency_ms"] > 0
    loaded = load_checkpoint(own / "new", nn_backbone(own))
    assert loaded.network.heads[0].rule.threshold == report["exits"][0]["threshold"]
    assert loaded.network.heads[0].rule.temperature == report["exits"][0]["temperature"]
    assert loaded.calibration == {**report, "data": "pictures"} and loaded.classes == CLASSES
    assert "it is not known what it learned from: nothing was noted" in printed
    assert report["bound"]["max_accuracy_drop"] == 0.05 and "drops by at most" not in printed
    drawn = plot("calibration", "--records", own / "new" / "report.json", "--out", own / "again")
    assert drawn.exit_code == 0
    assert (own / "again.json").read_text() == (own / "new" / "calibration.json").read_text()


def test_a_checkpoint_is_calibrated_for_a_budget_of_work(own):
    printed, report = calibrated(own, "--max-work", 0.5, "--curve")
    curve = json.loads((own / "new" / "anytime-report.json").read_text())
    assert curve["samples"] == report["samples"] and curve["data"] == "pictures" and curve["seed"] == 0
    assert [one["accuracy"] for one in curve["exits"]] == [one["accuracy_on_all"] for one in report["exits"]]
    assert "of the work" in printed
    drawn = plot("anytime", "--records", own / "new" / "anytime-report.json", "--out", own / "again")
    assert drawn.exit_code == 0, drawn.output
    assert (own / "again.json").read_text() == (own / "new" / "anytime.json").read_text()
    flops = [2 * 49 * 27 * 8, 2 * 25 * 72 * 8, 2 * 200 * 2]
    assert report["budget"] == {"max_work": 0.5} and report["exits"][0]["work"] == flops[0] / sum(flops)
    assert report["bound"]["reachable"] and report["expected_work"] < 1.0
    assert f"on average it was {report['expected_work']:.1%}" in printed
    printed, _ = calibrated(own, "--max-work", 0.2, out="again")
    assert f"The budget cannot be kept: the cheapest thresholds take {flops[0] / sum(flops):.3%}" in printed


def test_classes_beyond_those_of_the_images_are_numbers(own):
    """A network without names of classes, on images of fewer than it knows."""
    torch.manual_seed(0)
    network = EarlyExitNetwork(nn_backbone(own, classes=3), {"0": FusedAuxHead(8, 3)})
    (own / "own_stripes.py").write_text(OWN.replace("8 * 25, 2)", "8 * 25, 3)"))
    network.preprocessing = whole(16)
    save_checkpoint(own / "own", network.eval(), backbone="own_stripes:make")
    printed, report = calibrated(own, "--max-work", 1.0)
    assert printed.startswith("The classifier is not shown to be better than chance: of 240 samples it gets ")
    assert [(row["name"], row["samples"] > 0) for row in report["classes"]] == [
        ("lying", True),
        ("standing", True),
        ("2", False),
    ]


def nn_backbone(own, classes=2):
    scope: dict = {}
    exec((own / "own_stripes.py").read_text().replace("25, 2)", f"25, {classes})"), scope)
    return scope["make"]()


def test_who_knows_what_was_learned_in_another_form_says_it(own):
    network = load_checkpoint(own / "own", nn_backbone(own)).network
    in_memory = Samples([torch.arange(5)], frozenset(["float32 [3, 16, 16]"]))
    network.learned_from = LearnedFrom(None, fingerprint(network)).plus("temperature", in_memory)
    network.preprocessing = whole(16)
    save_checkpoint(own / "own", network, backbone="own_stripes:make", classes=CLASSES)
    shutil.copytree(own / "pictures" / "lying", own / "learned" / "lying")
    shutil.copytree(own / "pictures" / "lying", own / "learned" / "standing")
    found = {}
    for said in ((), ("--train-data", "none"), ("--train-data", "learned")):
        printed, report = calibrated(own, *said)
        advised = "--train-data FOLDER, or none" in printed
        found[said[-1:]] = report["bound"]["unknown"], report["left_out"], advised
    assert found["none",] == (None, 0, False) and found["learned",] == (None, 120, False)
    assert found[()][0].startswith("its temperatures were made from samples") and found[()][1:] == (0, True)


def test_what_cannot_be_done_is_one_line(own):
    def refused(message, *arguments):
        assert_one_line_error(auxhead(*arguments), message)
        assert not (own / "new").exists()

    to = ("--data", "pictures", "--out", "new")
    refused("--max-latency-ms: wants --batch", *ARGUMENTS, *to, "--max-latency-ms", 1)
    refused("--confidence: got 1.5, wants", *ARGUMENTS, *to, "--confidence", 1.5)
    refused("wants another directory", *ARGUMENTS, "--data", "pictures", "--out", "own")
    refused("wants what makes its backbone: auxhead calibrate own --backbone ", "calibrate", "own", *to)
    refused("wants what makes its backbone: auxhead export own --backbone ", "export", "own", "new")
    refused("--backbone: got 'timm:nosuch', which this timm", "calibrate", "own", *to, "--backbone", "timm:nosuch")
    two = ("--max-work", 0.5, "--max-accuracy-drop", 0.1)
    refused("--max-work: got --max-accuracy-drop and --max-work, wants one", *ARGUMENTS, *to, *two)
    refused("--train-data: own has no folders", *ARGUMENTS, *to, "--train-data", "own")
    (own / "pictures" / "standing").rename(own / "pictures" / "upright")
    refused("its network has the classes lying, standing, got images of lying, upright", *ARGUMENTS, *to)
