"""The demo end to end, on small pictures, through the commands that users type; and the thresholds that it chooses."""

import json

import pytest
import torch
from auxhead.model.basics.images import open_image
from auxhead.model.calibration.thresholds import exit_indices
from auxhead.model.commands.demo_run import choose_thresholds
from auxhead.model.commands.small_resnet import BLOCKS, resnet18_small, small_early_exit_network
from auxhead.model.commands.user_model import load_network
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoint_files import weights_of
from support.command_line import assert_one_line_error, auxhead
from support.pictures import whole, write_image_folder

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture(scope="module")
def done(without_interpreter, tmp_path_factory):
    """A folder of pictures, five of them damaged, what the demo wrote, and what it printed."""
    folder = write_image_folder(tmp_path_factory.mktemp("data") / "my stripes", per_class=65)
    for number in range(5):
        (folder / "lying" / f"{number}.png").write_bytes(b"")
    out = tmp_path_factory.mktemp("out") / "deep" / "demo"
    options = ("--data", folder, "--out", out, "--image-size", 16, "--epochs", 6, "--device", "cpu")
    assert_one_line_error(
        auxhead("demo", *options),
        f"{folder / 'lying' / '0.png'}: cannot be read as an image (it is empty); --skip-damaged leaves out",
    )
    assert not out.parent.exists(), "bad input leaves no folder behind"
    result = auxhead("demo", *options, "--skip-damaged")
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
    folder, out, result = done
    files = {"exits.json", "exits.png", "exits.svg", "model.json", "report.json"}
    assert {path.name for path in out.iterdir()} == {*files, weights_of(out).name}
    assert "Latency was not measured" in result.output
    told = result.output.index("Left out 5 of 130 images, which cannot be read:")
    assert told < result.output.index("training, all epochs: 384 of 384 images, epoch 6 of 6")
    assert f"{folder / 'lying' / '0.png'}: cannot be read as an image (it is empty)" in result.output
    assert "and 2 more" in result.output and "reading images: 130 of 130 images" in result.output
    tried = [line for line in result.output.splitlines() if "auxhead infer " in line]
    assert tried and not any(f"/lying/{number}.png" in tried[0] for number in range(5))


def test_the_report_adds_up(done):
    folder, out, _ = done
    report = json.loads((out / "report.json").read_text())
    assert report["data"] == "my stripes" and report["images"] == {"train": 75, "validation": 25, "test": 25}
    assert report["validation"]["full_accuracy"] - report["validation"]["accuracy"] <= 0.005 + 1e-9
    exits = report["exits"]
    assert [line["name"] for line in exits][-2:] == ["layer4.1", "classifier"] and len(exits) == 9
    assert sum(line["images"] for line in exits) == 25
    assert sum(line["share"] for line in exits) == pytest.approx(1.0)
    answered = sum(line["share"] * line["accuracy"] for line in exits if line["images"])
    assert answered == pytest.approx(report["accuracy"]) and report["accuracy"] > 0.8
    assert exits[-1]["accuracy_on_all"] == report["full_accuracy"]
    assert report["accuracy_drop_points"] == pytest.approx(100 * (report["full_accuracy"] - report["accuracy"]))
    assert report["left_before_last_block"] == pytest.approx(sum(line["share"] for line in exits[:7]))
    blocks = sum(min(place + 1, 8) * line["share"] for place, line in enumerate(exits))
    assert report["mean_blocks"] == pytest.approx(blocks)
    assert report["latency"] is None and set(report["seconds"]) == {"load", "train", "calibrate", "evaluate"}
    lasted = max(path.stat().st_mtime for path in out.iterdir()) - folder.stat().st_mtime
    assert 0.0 < sum(report["seconds"].values()) < lasted + 1.0 and min(report["seconds"].values()) > 0.0
    network = load_network("auxhead infer", out, None, None).network
    assert [head.rule.threshold for head in network.heads] == [line["threshold"] for line in exits[:-1]]


def test_infer_gives_the_answer_of_the_saved_network(done, tmp_path):
    folder, out, _ = done
    bracketed = tmp_path / "[red]a[x] :cat: [/b].png"  # no markup, which would be left out or fail
    bracketed.parent.mkdir()
    bracketed.write_bytes((folder / "lying" / "7.png").read_bytes())
    paths = [folder / "lying" / "8.png", folder / "standing" / "5.png", bracketed]
    description = json.loads((out / "model.json").read_text())
    assert description["backbone"] == "auxhead.model.commands.small_resnet:resnet18_small"
    result = auxhead("infer", out, *paths, "--device", "cpu")
    assert result.exit_code == 0, result.output
    loaded = load_network("auxhead infer", out, None, None)
    wanted = loaded.network(torch.stack([whole(16).pipeline()(open_image(path)) for path in paths]))
    rows = [line for line in result.output.splitlines() if ".png" in line]
    for row, path, label, confidence, exit_index in zip(
        rows, paths, wanted.label, wanted.confidence, wanted.exit_index, strict=True
    ):
        file, answer, sure, answered_by, likely = (cell.strip() for cell in row.strip("│┃ ").split("│"))
        assert file == str(path) and answer == loaded.classes[label] and sure == f"{confidence.item():.1%}"
        assert answered_by == f"{exit_index}: {[*loaded.network.taps, 'classifier'][exit_index]}"
        assert not likely.startswith(answer) and likely.count("%") == 1


def test_calibrate_leaves_out_the_images_that_the_demo_learned_from(done, tmp_path):
    folder, out, _ = done
    options = ("--data", folder, "--skip-damaged", "--out", tmp_path / "new", "--device", "cpu")
    result = auxhead("calibrate", out, *options)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert sum(report["samples"].values()) == 50 and report["left_out"] == 75 and report["bound"]["unknown"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["demo", "--device", "cuda"], "--device: got cuda", marks=without_gpu),
        (["demo", "--data", "nowhere"], "--data: nowhere does not exist, wants a directory of images by class"),
        (["demo", "--data", "x", "--skip-damaged"], "--data: class 'lying' has 0 images, wants at least 3"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_folder_behind(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for path in (write_image_folder(tmp_path / "x", per_class=4) / "lying").iterdir():
        path.write_text("no picture")
    before = sorted(tmp_path.iterdir())
    assert_one_line_error(auxhead(*arguments), message)
    assert sorted(tmp_path.iterdir()) == before


@given(st.integers(0, 10_000), st.sampled_from([None, 1, 3, 10]), st.sampled_from([0.0, 0.02, 0.1, 1.0]))
def test_the_drop_is_never_more_than_allowed_on_the_validation_split(seed, steps, drop):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(3, 60, generator=generator)
    if steps:  # ties
        scores = (scores * steps).round() / steps
    sure = torch.cat([scores, torch.full((1, 60), 0.95)])
    correct = torch.rand(4, 60, generator=generator) < sure ** torch.rand(1, generator=generator)
    thresholds = choose_thresholds(scores, correct, drop)
    exits = exit_indices(scores, thresholds)
    right = [bool(correct[exit_index, sample]) for sample, exit_index in enumerate(exits.tolist())]
    assert correct[-1].sum() - sum(right) <= drop * 60 + 1e-6
    assert all(0.0 <= one <= 1.0 for one in thresholds.tolist())


def test_a_head_that_is_right_where_it_is_sure_lets_those_leave():
    correct = torch.arange(400) < torch.tensor([[200], [400]])
    scores = torch.where(correct[:1], 0.95, 0.5) - torch.linspace(0.0, 0.1, 400)
    exits = exit_indices(scores, choose_thresholds(scores, correct, 0.0))
    assert torch.equal(exits, torch.arange(400) // 200)
