"""``auxhead infer``: any images, in batches, as a table or as JSON lines, from checkpoints of any backbone."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from auxhead.model import EarlyExitNetwork, FusedAuxHead, attach_exits, save_checkpoint
from auxhead.model.basics.images import MEAN, STD, normalise, open_image, to_pixels
from PIL import Image
from support.command_line import assert_one_line_error, auxhead

NAMES = ("cat", "dog", "fox")


@pytest.fixture
def network() -> EarlyExitNetwork:
    torch.manual_seed(0)
    heads = {"maxpool": FusedAuxHead(24, 3), "stage2": FusedAuxHead(48, 3)}
    backbone = torchvision.models.shufflenet_v2_x0_5(num_classes=3)
    return EarlyExitNetwork(backbone, heads, rules=0.36, example_input=torch.zeros(2, 3, 32, 32)).eval()


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
    save_checkpoint(
        out, network, backbone="torchvision.models:shufflenet_v2_x0_5", classes=NAMES, image_size=32, mean=MEAN, std=STD
    )
    return out


@pytest.mark.parametrize(("runner", "batch"), [("eager", 2), ("auto", 64)])
def test_json_lines(network, pictures, checkpoint, tmp_path, batch, runner):
    out = tmp_path / "answers.jsonl"
    result = auxhead(
        "infer", tmp_path / "pictures", "--checkpoint", checkpoint, "--batch", batch, "--json", out,
        "--runner", runner, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["image"] for line in lines] == [*map(str, pictures)]
    wanted = network(normalise(torch.stack([to_pixels(open_image(path), 32) for path in pictures])))
    assert [line["class_index"] for line in lines] == wanted.label.tolist()
    assert [line["exit_index"] for line in lines] == wanted.exit_index.tolist()
    assert len({line["exit_index"] for line in lines}) > 1
    torch.testing.assert_close(torch.tensor([line["confidence"] for line in lines]), wanted.confidence)
    for line in lines:
        assert line["class"] == NAMES[line["class_index"]]
        assert line["exit"] == ("maxpool", "stage2", "classifier")[line["exit_index"]]
    words = " ".join(result.output.split())
    assert words.startswith("7 images in ") and f"Saved in {out}." in words and "% maxpool" in words


def test_the_table_ends_in_a_summary(pictures, checkpoint):
    result = auxhead("infer", *pictures, "--checkpoint", checkpoint, "--batch", 3, "--device", "cpu")
    assert result.exit_code == 0 and all(str(path) in result.output for path in pictures), result.output
    assert "7 images in " in result.output.splitlines()[-1]


def test_a_picture_that_cannot_be_read_leaves_the_file_of_before(pictures, checkpoint, tmp_path):
    out = tmp_path / "answers.jsonl"
    out.write_text("of before\n")
    pictures[4].write_bytes(b"broken")
    result = auxhead("infer", *pictures, "--checkpoint", checkpoint, "--batch", 2, "--json", out, "--device", "cpu")
    assert_one_line_error(result, f"{pictures[4]}: cannot be read as an image")
    assert out.read_text() == "of before\n"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_checkpoints_that_do_not_suffice(network, pictures, tmp_path):
    for change, message in (
        ({"backbone": "torchvision.models:resnet19"}, "with 'torchvision.models:resnet19', which this torchvision"),
        ({"classes": ()}, "has no names of classes, wants --backbone with a function of yours"),
        ({"backbone": "mine:make"}, "wants what makes its backbone: --backbone mine:make"),
        ({"backbone": None}, "does not name a backbone of torchvision, wants what makes its backbone: --backbone pa"),
        ({"image_size": None}, "checkpoint: was saved without image_size"),
    ):
        saved = {"backbone": "torchvision.models:shufflenet_v2_x0_5", "classes": NAMES, "image_size": 32, **change}
        save_checkpoint(tmp_path / "net", network, mean=MEAN, std=STD, **saved)
        assert_one_line_error(auxhead("infer", *pictures, "--checkpoint", tmp_path / "net", "--device", "cpu"), message)


def test_a_backbone_of_torchvision_may_be_named_as_it_is_to_train(network, pictures, tmp_path):
    save_checkpoint(tmp_path / "net", network, classes=NAMES, image_size=32, mean=MEAN, std=STD)
    options = ("--checkpoint", tmp_path / "net", "--device", "cpu", "--backbone")
    result = auxhead("infer", pictures[0], *options, "shufflenet_v2_x0_5")
    assert result.exit_code == 0 and "1 images" in result.output.replace("1 image ", "1 images "), result.output
    wants = "--backbone: got 'shufflenet', wants package.module:function, or a classifier of torchvision.models by name"
    assert_one_line_error(auxhead("infer", pictures[0], *options, "shufflenet"), wants)


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
    save_checkpoint("own", network, classes=NAMES, image_size=32, mean=MEAN, std=STD)
    options = ("--checkpoint", "own", "--json", "-", "--device", "cpu", "--backbone", "own_net:Net")
    result = auxhead("infer", *pictures[:3], *options)
    assert result.exit_code == 0, result.output
    wanted = network(normalise(torch.stack([to_pixels(open_image(path), 32) for path in pictures[:3]])))
    assert [json.loads(line)["class_index"] for line in result.stdout.splitlines()] == wanted.label.tolist()


def test_folders_and_runners_that_are_none(checkpoint, pictures, tmp_path):
    (tmp_path / "empty").mkdir()
    result = auxhead("infer", tmp_path / "empty", "--checkpoint", checkpoint, "--device", "cpu")
    assert_one_line_error(result, f"{tmp_path / 'empty'}: has no images below it, wants files that end in .")
    if not torch.cuda.is_available():
        result = auxhead("infer", *pictures, "--checkpoint", checkpoint, "--runner", "gated", "--device", "cpu")
        assert_one_line_error(result, "--runner: gated: ")
