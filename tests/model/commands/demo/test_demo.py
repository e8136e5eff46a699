"""The demo end to end, on small pictures, through the commands that users type."""

import json

import pytest
import torch
from auxhead.model.basics.images import normalise, open_image, to_pixels
from auxhead.model.calibration.samples import collect_logits
from auxhead.model.commands.demo.experiment import calibrate_demo, early_exit_answers, run_demo
from auxhead.model.commands.small_resnet import BLOCKS, resnet18_small, small_early_exit_network
from auxhead.model.commands.user_model import load_network
from auxhead.model.training.batches import PixelBatches
from auxhead.model.training.data_sets import load_folder
from support.checkpoint_files import weights_of
from support.command_line import assert_one_line_error, auxhead
from support.pictures import write_image_folder

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture(scope="module")
def done(without_interpreter, tmp_path_factory):
    """A folder of pictures, what the demo wrote, and what it printed."""
    folder = write_image_folder(tmp_path_factory.mktemp("data") / "my stripes", per_class=40)
    out = tmp_path_factory.mktemp("out") / "deep" / "demo"
    result = auxhead("demo", "--data", folder, "--out", out, "--image-size", 16, "--epochs", 3, "--device", "cpu")
    assert result.exit_code == 0, result.output
    return folder, out, result


def test_the_small_resnet_keeps_the_resolution_of_a_small_image_and_no_head_exits() -> None:
    backbone = resnet18_small(7).eval()
    early = backbone.maxpool(backbone.relu(backbone.bn1(backbone.conv1(torch.zeros(1, 3, 16, 16)))))
    assert backbone(torch.zeros(2, 3, 16, 16)).shape == (2, 7) and early.shape == (1, 64, 16, 16)
    network = small_early_exit_network(4).eval()
    assert network.taps == BLOCKS and len(BLOCKS) == 8
    assert (network(torch.randn(3, 3, 16, 16)).exit_index == 8).all()


def test_the_demo_writes_what_it_says(done):
    _, out, result = done
    files = {"exits.json", "exits.png", "exits.svg", "model.json", "report.json"}
    assert {path.name for path in out.iterdir()} == {*files, weights_of(out).name}
    assert "Latency was not measured" in result.output
    assert "auxhead infer --checkpoint" in result.output


def test_the_report_adds_up(done):
    folder, out, _ = done
    report = json.loads((out / "report.json").read_text())
    assert report["data"] == "my stripes" and report["images"] == {"train": 48, "validation": 16, "test": 16}
    exits = report["exits"]
    assert [line["name"] for line in exits][-2:] == ["layer4.1", "classifier"] and len(exits) == 9
    assert sum(line["images"] for line in exits) == 16
    assert sum(line["share"] for line in exits) == pytest.approx(1.0)
    answered = sum(line["share"] * line["accuracy"] for line in exits if line["images"])
    assert answered == pytest.approx(report["accuracy"])
    assert exits[-1]["accuracy_on_all"] == report["full_accuracy"]
    assert report["accuracy_drop_points"] == pytest.approx(100 * (report["full_accuracy"] - report["accuracy"]))
    assert report["left_before_last_block"] == pytest.approx(sum(line["share"] for line in exits[:7]))
    blocks = sum(min(place + 1, 8) * line["share"] for place, line in enumerate(exits))
    assert report["mean_blocks"] == pytest.approx(blocks)
    assert report["latency"] is None and set(report["seconds"]) == {"load", "train", "calibrate", "evaluate"}
    lasted = max(path.stat().st_mtime for path in out.iterdir()) - folder.stat().st_mtime
    assert 0.0 < sum(report["seconds"].values()) < lasted + 1.0 and min(report["seconds"].values()) > 0.0
    assert report["environment"]["torch"] == torch.__version__.partition("+")[0] or report["environment"]["torch"]


def test_infer_gives_the_answer_of_the_saved_network(done):
    folder, out, _ = done
    paths = [folder / "lying" / "3.png", folder / "standing" / "5.png", folder / "lying" / "0.png"]
    description = json.loads((out / "model.json").read_text())
    assert description["backbone"] == "auxhead.model.commands.small_resnet:resnet18_small"
    description["backbone"] = "auxhead.model.commands.demo.small_resnet:resnet18_small"  # as it was called once
    (out / "model.json").write_text(json.dumps(description))
    result = auxhead("infer", "--checkpoint", out, *paths, "--device", "cpu")
    assert result.exit_code == 0, result.output
    loaded = load_network(out, None, None)
    pixels = torch.stack([to_pixels(open_image(path), 16) for path in paths])
    wanted = loaded.network(normalise(pixels))
    rows = [line for line in result.output.splitlines() if ".png" in line]
    assert len(rows) == 3
    for row, path, label, confidence, exit_index in zip(
        rows, paths, wanted.label, wanted.confidence, wanted.exit_index, strict=True
    ):
        file, answer, sure, answered_by, likely = (cell.strip() for cell in row.strip("│┃ ").split("│"))
        assert file == str(path) and answer == loaded.classes[label] and sure == f"{confidence.item():.1%}"
        assert answered_by == f"{exit_index + 1}: {[*loaded.network.taps, 'classifier'][exit_index]}"
        assert likely.startswith(answer) and likely.count("%") == 2


def test_names_with_brackets_are_printed_as_they_are(done, tmp_path):
    """They are no markup, which would be left out or fail."""
    folder, out, _ = done
    path = tmp_path / "[red]a[x] :cat: [/b].png"
    path.parent.mkdir()
    path.write_bytes((folder / "lying" / "3.png").read_bytes())
    result = auxhead("infer", "--checkpoint", out, path, "--device", "cpu")
    assert result.exit_code == 0 and str(path) in result.output, result.output


def test_a_trained_network_leaves_early_and_keeps_its_promise():
    """The same as on the digits, on pictures that are learnt in seconds."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as directory:
        source = load_folder(write_image_folder(Path(directory) / "x", per_class=60))
        told = []
        run = run_demo(
            source,
            image_size=16,
            device=torch.device("cpu"),
            epochs=6,
            start_phase=lambda name, total: lambda images, remark: told.append((name, total, images)),
        )
    report = run.report
    assert report.validation["full_accuracy"] - report.validation["accuracy"] <= 0.005 + 1e-9
    assert report.full_accuracy > 0.9
    for name in ("reading images", "training, all epochs"):
        assert sum(images for n, _, images in told if n == name) == next(total for n, total, _ in told if n == name)
    # what the tables say is what the network does
    test = run.splits.test
    label, exit_index = early_exit_answers(run.network, test)
    said = collect_logits(run.network, PixelBatches(test, len(test.labels), device=torch.device("cpu"))).logits
    assert torch.equal(label, said.argmax(2).gather(0, exit_index[None])[0])
    calibrate_demo(run.network, run.splits.validation, 1.0)
    _, exit_index = early_exit_answers(run.network, run.splits.validation)
    assert (exit_index == 0).any()  # anything goes, so the first exit is open


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--data", "nowhere"], "--data: nowhere does not exist"),
        pytest.param(["demo", "--device", "cuda"], "--device: got cuda", marks=without_gpu),
        (["demo", "--dataset", "cifar10", "--root", "nowhere"], "--root: nowhere does not hold CIFAR-10"),
        (["demo", "--out", "file"], "--out: file is a file, wants a directory"),
        (["infer", "--checkpoint", "nowhere", "x.png"], "checkpoint: nowhere has no model.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert_one_line_error(auxhead(*arguments), message)


@pytest.mark.parametrize(
    "arguments",
    [["--data", "damaged"], ["--dataset", "cifar10", "--root", "nope"]],
    ids=["damaged", "no root"],
)
def test_bad_input_leaves_no_folder_behind(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (write_image_folder(tmp_path / "damaged", per_class=4) / "lying" / "2.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.iterdir())
    result = auxhead("demo", *arguments, "--device", "cpu")
    assert result.exit_code == 2 and sorted(tmp_path.iterdir()) == before, result.output


@pytest.mark.parametrize("out", ["file/in/it"])
def test_a_file_in_the_place_of_the_results_is_told_before_anything_is_read(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert_one_line_error(auxhead("demo", "--data", "nope", "--out", out), "file is a file, wants a directory")


def test_damaged_pictures_are_left_out_when_asked(tmp_path):
    folder = write_image_folder(tmp_path / "x", per_class=20)
    for number in range(5):
        (folder / "lying" / f"{number}.png").write_bytes(b"")
    options = ["--out", tmp_path / "out", "--image-size", 8, "--epochs", 1, "--device", "cpu"]
    assert_one_line_error(
        auxhead("demo", "--data", folder, *options),
        f"{folder / 'lying' / '0.png'}: cannot be read as an image (it is empty); --skip-damaged leaves out",
    )
    result = auxhead("demo", "--data", folder, "--skip-damaged", *options)
    assert result.exit_code == 0, result.output
    told = result.output.index("Left out 5 of 40 images, which cannot be read:")
    assert told < result.output.index("training, all epochs: ")
    assert f"{folder / 'lying' / '0.png'}: cannot be read as an image (it is empty)" in result.output
    assert "and 2 more" in result.output
    assert sum(json.loads((tmp_path / "out" / "report.json").read_text())["images"].values()) == 35
    tried = [line for line in result.output.splitlines() if "auxhead infer" in line]
    assert tried and not any(f"/lying/{number}.png" in tried[0] for number in range(5))


def test_a_class_of_damaged_pictures_alone_is_named(tmp_path):
    folder = write_image_folder(tmp_path / "x", per_class=4)
    for path in (folder / "lying").iterdir():
        path.write_text("no picture")
    result = auxhead("demo", "--data", folder, "--skip-damaged", "--out", tmp_path / "out", "--device", "cpu")
    assert "Left out 4 of 8 images" in result.output
    assert_one_line_error(result, "--data: class 'lying' has 0 images, wants at least 3")
    assert not (tmp_path / "out").exists()
