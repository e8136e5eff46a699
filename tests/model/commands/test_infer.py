"""``auxhead infer``, from checkpoints of any backbone; outputs of commands: files, links, pipes, devices, terminals."""

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from auxhead.model import EarlyExitNetwork, FusedAuxHead, attach_exits, save_checkpoint
from auxhead.model.__main__ import app
from auxhead.model.basics.files import writing
from auxhead.model.basics.images import open_image
from auxhead.plots.records import COMMITTED
from PIL import Image
from support.command_line import assert_one_line_error, auxhead, plot, tune
from support.example_models import SmallNet
from support.pictures import whole
from typer.testing import CliRunner

NAMES = ("cat", "dog", "fox")


@pytest.fixture
def network() -> EarlyExitNetwork:
    heads = {"maxpool": FusedAuxHead(24, 3), "stage2": FusedAuxHead(48, 3)}
    backbone = torchvision.models.shufflenet_v2_x0_5(num_classes=3)
    network = EarlyExitNetwork(backbone, heads, rules=0.36, example_input=torch.zeros(2, 3, 32, 32)).eval()
    network.preprocessing = whole(32)
    return network


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Seven of them, in folders within folders, beside what is no picture."""
    generator = np.random.default_rng(0)
    found = []
    for index, name in enumerate(("a/1.png", "a/2.JPG", "a/b/3.png", "c/4.bmp", "5.png", "6.png", "7.webp")):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = generator.integers(0, 256, (1, 1, 3))
        pixels = (generator.integers(0, 100, (20 + index, 30, 3)) + colour).clip(0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        found.append(path)
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    return sorted(found)


@pytest.fixture
def checkpoint(network: EarlyExitNetwork, tmp_path: Path) -> Path:
    out = tmp_path / "net"
    save_checkpoint(out, network, backbone="torchvision.models:shufflenet_v2_x0_5", classes=NAMES)
    return out


@pytest.mark.parametrize(("runner", "batch"), [("eager", 2), ("auto", 64)])
def test_json_lines(network, pictures, checkpoint, tmp_path, batch, runner):
    out = tmp_path / "answers.jsonl"
    result = auxhead(
        "infer", checkpoint, tmp_path / "pictures", "--batch", batch, "--json", out,
        "--runner", runner, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["image"] for line in lines] == [*map(str, pictures)]
    wanted = network(torch.stack([whole(32).pipeline()(open_image(path)) for path in pictures]))
    assert [line["class_index"] for line in lines] == wanted.label.tolist()
    assert [line["exit_index"] for line in lines] == wanted.exit_index.tolist()
    assert len({line["exit_index"] for line in lines}) > 1
    torch.testing.assert_close(torch.tensor([line["confidence"] for line in lines]), wanted.confidence)
    for line in lines:
        assert line["class"] == NAMES[line["class_index"]]
        assert line["exit"] == ("maxpool", "stage2", "classifier")[line["exit_index"]]
    words = " ".join(result.output.split())
    assert words.startswith("7 images in ") and f"Saved in {out}." in words and "% maxpool" in words


def test_a_picture_that_cannot_be_read_leaves_the_file_of_before(pictures, checkpoint, tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text("of before\n")
    pictures[4].write_bytes(b"broken")
    result = auxhead("infer", checkpoint, *pictures, "--batch", 2, "--json", out, "--device", "cpu")
    assert_one_line_error(result, f"{pictures[4]}: cannot be read as an image")
    assert out.read_text() == "of before\n"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_checkpoints_that_do_not_suffice(network, pictures, tmp_path):
    for change, message in (
        ({"backbone": "torchvision.models:resnet19"}, "got 'torchvision.models:resnet19', which this torchvision has"),
        ({"classes": ()}, "has no names of classes, by which torchvision.models:shufflenet_v2_x0_5 would be"),
        (
            {"backbone": "mine:make"},
            f"wants what makes its backbone: auxhead infer {tmp_path / 'net'} --backbone mine:make",
        ),
        (
            {"backbone": None},
            "not name a backbone of torchvision or timm, wants what makes its backbone: auxhead infer ",
        ),
        ({"preprocessing": None}, "checkpoint: was saved without preprocessing"),
    ):
        saved = {"backbone": "torchvision.models:shufflenet_v2_x0_5", "classes": NAMES, **change}
        network.preprocessing = saved.pop("preprocessing", whole(32))
        save_checkpoint(tmp_path / "net", network, **saved)
        assert_one_line_error(auxhead("infer", tmp_path / "net", *pictures, "--device", "cpu"), message)


def test_a_backbone_of_torchvision_may_be_named_as_it_is_to_train(network, pictures, tmp_path):
    save_checkpoint(tmp_path / "net", network, classes=NAMES)
    options = (tmp_path / "net", "--device", "cpu", "--backbone")
    result = auxhead("infer", *options, "shufflenet_v2_x0_5", pictures[0])
    assert result.exit_code == 0 and "1 images" in result.output.replace("1 image ", "1 images "), result.output
    wants = "--backbone: got 'shufflenet', wants package.module:function, or a classifier of torchvision.models by name"
    assert_one_line_error(auxhead("infer", *options, "shufflenet", pictures[0]), wants)


def test_a_network_with_exits_of_its_own_wants_the_function_that_makes_it(pictures, tmp_path, monkeypatch):
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.one, self.two = nn.Conv2d(3, 8, 3, 2), nn.Conv2d(8, 9, 3, 2)\n"
        "        self.exit, self.last = nn.Linear(8, 3), nn.Linear(9, 3)\n\n    def forward(self, x):\n"
        "        one = self.one(x)\n"
        "        return [self.exit(one.mean((2, 3))), self.last(self.two(one).mean((2, 3)))]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("own_net").Net().eval()
    network = attach_exits(model, torch.randn(2, 3, 32, 32), rules=0.4)
    network.preprocessing = whole(32)
    save_checkpoint("own", network, classes=NAMES)
    options = ("own", "--json", "-", "--device", "cpu", "--backbone", "own_net:Net")
    result = auxhead("infer", *options, *pictures[:3])
    assert result.exit_code == 0, result.output
    wanted = network(torch.stack([whole(32).pipeline()(open_image(path)) for path in pictures[:3]]))
    assert [json.loads(line)["class_index"] for line in result.stdout.splitlines()] == wanted.label.tolist()


def test_before_thresholds_are_chosen_no_head_answers_and_it_is_said(network, pictures, tmp_path):
    network.set_rules(1.0)
    named = {"backbone": "torchvision.models:shufflenet_v2_x0_5", "classes": NAMES}
    save_checkpoint(tmp_path / "new", network, **named)
    result = auxhead("infer", tmp_path / "new", *pictures[:2], "--device", "cpu")
    assert "100% classifier. No head may answer yet: `auxhead calibrate` chooses thresholds." in result.output


def test_folders_and_runners_that_are_none(checkpoint, pictures, tmp_path):
    (tmp_path / "empty").mkdir()
    result = auxhead("infer", checkpoint, tmp_path / "empty", "--device", "cpu")
    assert_one_line_error(result, f"{tmp_path / 'empty'}: has no images below it, wants files that end in .")
    if not torch.cuda.is_available():
        result = auxhead("infer", checkpoint, *pictures, "--runner", "gated", "--device", "cpu")
        assert_one_line_error(result, "--runner: gated: ")


MAKE = "from support.example_models import SmallNet\n\n\nmake = SmallNet\n"
OPTIONS = ("net", "--backbone", "outputs_net:make", "--device", "cpu")
#: A command that needs no PyTorch.
TABLE = [sys.executable, "-m", "auxhead.autotune", "table", str(COMMITTED / "h200/doctor.jsonl")]


@pytest.fixture
def folder(users_folder: Path) -> Path:
    """The current one, with a checkpoint and a picture whose name holds what terminals obey."""
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5)}).eval()
    network.preprocessing = whole(8)
    save_checkpoint("net", network, classes=["café"] + [f"thé {number}" for number in range(4)])
    Path("outputs_net.py").write_text(MAKE)
    Image.new("RGB", (8, 8)).save("a\x1b[31m\nb.png")
    return users_folder


def picture() -> str:
    (found,) = Path().glob("*.png")
    return str(found)


def test_a_link_is_written_through_and_a_device_is_written_to(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    target, link = folder / "elsewhere" / "answers", folder / "link"
    target.write_text("of before")
    link.symlink_to(target)
    for out in (link, Path("/dev/null")):
        result = auxhead("infer", *OPTIONS, picture(), "--json", out)
        assert result.exit_code == 0, result.output
    assert link.is_symlink() and json.loads(target.read_text())["image"] == picture()
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null")
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_a_pipe_gets_the_answers(folder: Path) -> None:
    os.mkfifo("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    assert auxhead("infer", *OPTIONS, picture(), "--json", "pipe").exit_code == 0
    reader.join()
    assert json.loads(read[0])["exit"] == "classifier" and Path("pipe").is_fifo()


def test_standard_output_by_its_names_gets_the_answers_alone(folder: Path) -> None:
    for out in ("-", "/dev/stdout"):
        result = auxhead("infer", *OPTIONS, picture(), "--json", out)
        assert [json.loads(line)["image"] for line in result.stdout.splitlines()] == [picture()], result.output
    result = plot("perfetto", COMMITTED / "h200/overlap.jsonl", "--out", "/dev/stdout")
    assert json.loads(result.stdout)["traceEvents"], result.output


def test_an_output_that_takes_nothing_is_named(folder: Path) -> None:
    assert_one_line_error(auxhead("infer", *OPTIONS, picture(), "--json", "/dev/full"), "/dev/full: No space left")
    assert_one_line_error(auxhead("infer", *OPTIONS, picture(), "--json", "no/such"), "Error: no/such: No such file")
    (folder / "circle").symlink_to("circle")
    assert_one_line_error(auxhead("infer", *OPTIONS, picture(), "--json", "circle"), "Error: circle: Too many levels")
    calibrate = ("calibrate", "circle", "--data", ".", "--out")
    assert_one_line_error(auxhead(*calibrate, "circle"), "--out: circle is the checkpoint itself")
    wants = "/dev/null: is no file, wants a file that lines are added to"
    assert_one_line_error(tune("bench", "--out", "/dev/null"), wants)


def test_standard_output_that_is_full_or_closed() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(TABLE, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "Error: standard output: No space left on device\n")
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *TABLE], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_output_that_cannot_hold_a_name_gets_it_escaped(folder: Path) -> None:
    result = CliRunner(charset="ascii", env={"COLUMNS": "200"}).invoke(app, ["infer", *OPTIONS, picture()])
    assert result.exit_code == 0 and "th\\xe9" in result.stdout, result.output


def test_control_characters_of_names_do_not_reach_the_terminal(folder: Path) -> None:
    shown = auxhead("infer", *OPTIONS, picture())
    assert shown.exit_code == 0 and "\x1b" not in shown.output and "a\\x1b[31m\\nb.png" in shown.output
    Path(picture()).write_bytes(b"no picture")
    assert_one_line_error(auxhead("infer", *OPTIONS, picture()), "a\\x1b[31m\\nb.png: cannot be read as an image")
    result = tune("table", "records\x1b]0;title\x07.jsonl")
    assert_one_line_error(result, "records\\x1b]0;title\\x07.jsonl: no such file")


def test_an_empty_name_is_refused(folder: Path) -> None:
    before = sorted(folder.iterdir())
    for run, arguments, named in (
        (auxhead, ("infer", *OPTIONS, ""), "argument"),
        (auxhead, ("infer", "", "a.png"), "argument"),
        (auxhead, ("train", "--data="), "--data"),
        (tune, ("table", ""), "argument"),
        (tune, ("doctor", "--out", "", "trace.json"), "--out"),
        (plot, ("all", "--out", ""), "--out"),
    ):
        assert_one_line_error(run(*arguments), f"Error: {named}: got an empty text")
    assert sorted(folder.iterdir()) == before


def test_a_failure_names_the_output_and_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("of before")
    with pytest.raises(OSError) as caught, writing(out) as file:
        file.write(b"half")
        raise OSError(28, "No space left on device", file.name)
    assert caught.value.filename == str(out) and out.read_text() == "of before"
    assert list(tmp_path.iterdir()) == [out]
