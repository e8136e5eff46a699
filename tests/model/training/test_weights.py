"""``auxhead train --backbone --weights``: files, torchvision's by name, timm's; classifiers of other classes."""

from dataclasses import replace
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from auxhead.model import Preprocessing, accuracy_of_exits, load_checkpoint
from auxhead.model.commands.user_model import load_network
from PIL import Image
from safetensors.torch import save_file
from support.command_line import assert_one_line_error, auxhead
from support.pictures import stripes
from support.training_command import rows, trained
from torchvision.transforms._presets import ImageClassification

pytestmark = pytest.mark.usefixtures("without_interpreter")


def accuracies_of(directory, folder, backbone):
    """Of a checkpoint's exits, all by itself: torchvision's pipeline, the saved network, eager."""
    loaded = load_checkpoint(directory, backbone)
    data = torchvision.datasets.ImageFolder(folder, loaded.preprocessing.pipeline())
    return accuracy_of_exits(loaded.network, torch.utils.data.DataLoader(data, 8))


@pytest.fixture(scope="module")
def pretrained():
    """ShuffleNet, trained a little on stripes that fill a third of wide pictures, as torchvision prepares them."""
    torch.manual_seed(0)
    backbone = torchvision.models.shufflenet_v2_x0_5(num_classes=2)
    generator = np.random.default_rng(1)
    pictures = [wide(label, generator) for label in (0, 1) * 32]
    x = torch.stack([ImageClassification(crop_size=32, resize_size=37)(one) for one in pictures])
    y = torch.tensor((0, 1) * 32)
    optimizer = torch.optim.AdamW(backbone.parameters(), 5e-3)
    for _ in range(12):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(backbone(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        [backbone(x) for _ in range(40)]  # batch norms get the statistics of now
    return backbone.eval()


def wide(label, generator):
    whole = Image.new("RGB", (96, 32), (200, 30, 90))
    whole.paste(stripes(label, 32, generator), (32, 0))
    return whole


def wide_folder(folder, classes=("standing", "lying"), per_class=12):
    generator = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            wide(number % 2, generator).save(folder / name / f"{index}.png")
    return folder


@pytest.mark.parametrize("form", ["pth", "safetensors", "training.pth"])
def test_heads_on_a_frozen_backbone_of_weights_in_a_file(pretrained, tmp_path, monkeypatch, form):
    """Its classifier answers as before, for pictures that are prepared as it was trained."""
    monkeypatch.chdir(tmp_path)
    state = pretrained.state_dict()
    if form == "safetensors":
        save_file(state, "w.safetensors")
    else:
        torch.save({"model": state, "epoch": 3} if form == "training.pth" else state, f"w.{form}")
    folder = wide_folder(tmp_path / "wide", ("a standing", "lying"))
    options = ("--data", folder, "--backbone", "shufflenet_v2_x0_5", "--weights", f"w.{form}", "--method", "heads")
    result = trained(*options, "--crop", 32, "--tap", "stage3")
    assert "resized to a shorter side of 37, cropped to 32 x 32 pixels" in result.output
    assert result.output.count("of the pictures; `auxhead train --squash` keeps all of them, `--resize 32` cuts") == 1
    answered = auxhead("infer", "out", folder, "--device", "cpu", "--backbone", "shufflenet_v2_x0_5").output
    assert answered.count("of the pictures; `auxhead train --squash` keeps all") == 1
    assert f"With weights w.{form}; the classifier is theirs, of as many classes." in result.output
    loaded = load_checkpoint("out", torchvision.models.shufflenet_v2_x0_5(num_classes=2))
    for name, value in loaded.network.backbone.state_dict().items():
        assert torch.equal(value, state[name]), name
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(loaded.network.logits(x)[-1], pretrained(x))
    assert accuracies_of("out", folder, torchvision.models.shufflenet_v2_x0_5(num_classes=2))[-1] > 0.9
    assert "trained on images that nobody has noted" in str(loaded.network.learned_from.unknown)


def test_a_backbone_of_two_classifiers_is_refused_with_the_reason(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("levit_128s", num_classes=5).state_dict(), "w.pth")
    folder = wide_folder(tmp_path / "wide", ("a", "b"))
    refused = auxhead("train", "--data", folder, "--backbone", "timm:levit_128s", "--weights", "w.pth")
    has = "timm:levit_128s has 2 classifiers, head.linear and head_dist.linear, of which it answers the mean, and one"
    assert_one_line_error(refused, f"--weights: w.pth: {has} alone can be new; wants weights of 2 classes, or another")


def test_a_classifier_of_other_classes_is_new_and_learns_with_the_heads(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(pretrained.state_dict(), "w.pth")
    folder = wide_folder(tmp_path / "wide", ("a", "b", "c"), per_class=18)  # a and c are the same
    make = ("--data", folder, "--backbone", "shufflenet_v2_x0_5", "--weights", "w.pth", "--crop", 32, "--tap", "stage4")
    result = trained(*make, "--method", "heads", "--learning-rate", 0.02)
    assert "With weights w.pth; the classifier is new: fc." in result.output
    assert "30 images to train with, 30 an epoch in batches of 30; 12 for validation, 12 left" in result.output
    found = load_checkpoint("out", torchvision.models.shufflenet_v2_x0_5(num_classes=3)).network.backbone.state_dict()
    for name, value in pretrained.state_dict().items():
        assert name.startswith("fc.") or torch.equal(found[name], value), name
    assert float(rows(result)["classifier"].removesuffix("%")) > 50.0
    state = {**pretrained.state_dict(), "conv1.0.weight": torch.zeros(24, 3, 5, 5)}
    torch.save(state, "w.pth")
    what = "--weights: w.pth does not fit shufflenet_v2_x0_5: 'conv1.0.weight' is [24, 3, 5, 5], wants [24, 3, 3, 3]"
    assert_one_line_error(auxhead("train", *make), what)
    torch.save({0: torch.ones(1)}, "w.pth")
    assert_one_line_error(auxhead("train", *make), "--weights: w.pth holds dict, wants parameters by name")
    torch.save({"other.weight": torch.ones(1)}, "w.pth")
    assert_one_line_error(auxhead("train", *make), "--weights: w.pth is not of shufflenet_v2_x0_5: it ")
    torch.save([1], "w.pth")
    assert_one_line_error(auxhead("train", *make), "--weights: w.pth holds list, wants parameters by name")
    (tmp_path / "w.pth").write_bytes(b"PK")
    assert_one_line_error(auxhead("train", *make), "--weights: w.pth cannot be read as parameters")
    torch.save(pretrained, "w.pth")
    assert_one_line_error(
        auxhead("train", *make), "(it holds more, a whole module say); wants these alone: torch.save("
    )


def test_a_new_classifier_that_is_no_linear_layer_is_refused_where_it_would_stay_random(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(torchvision.models.squeezenet1_1(num_classes=7).state_dict(), "w.pth")
    folder = wide_folder(tmp_path / "wide", per_class=6)
    options = ("--data", folder, "--backbone", "squeezenet1_1", "--weights", "w.pth", "--crop", 64)
    refused = auxhead("train", *options, "--method", "heads")
    assert_one_line_error(
        refused, "--method: heads trains no new classifier that is a Conv2d, as that of squeezenet1_1"
    )


def test_weights_of_torchvision_by_name(pretrained, tmp_path, monkeypatch):
    """A thousand classes; what they are prepared by, and where they are looked for, is theirs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    folder = wide_folder(tmp_path / "wide", per_class=6)
    weights = torchvision.models.ShuffleNet_V2_X0_5_Weights.DEFAULT
    options = ("--data", folder, "--backbone", "shufflenet_v2_x0_5", "--weights", "DEFAULT", "--epochs", 1)

    def no_network(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    file = tmp_path / "cache" / "hub" / "checkpoints" / "shufflenetv2_x0.5-f707e7126e.pth"
    where = f"--weights: {weights} is not at {file}, and {weights.url} cannot be fetched (<urlopen error no network>)"
    assert_one_line_error(auxhead("train", *options), where)
    of_imagenet = torchvision.models.shufflenet_v2_x0_5().state_dict()
    of_imagenet |= {name: value for name, value in pretrained.state_dict().items() if not name.startswith("fc.")}
    monkeypatch.setattr(type(weights), "get_state_dict", lambda *_, **__: of_imagenet)
    result = trained(*options, "--method", "heads", "--batch-size", 4)
    wanted = replace(Preprocessing.of_weights(weights), crop=224, resize=256)
    loaded = load_checkpoint("out", torchvision.models.shufflenet_v2_x0_5(num_classes=2))
    assert loaded.preprocessing == wanted and wanted.describe() in result.output
    assert loaded.network.learned_from.unknown is None, "ImageNet has none of these"
    assert torch.equal(loaded.network.backbone.conv1[0].weight, of_imagenet["conv1.0.weight"])
    trained(*options, "--method", "heads", "--batch-size", 4, "--crop", 64, "--channels", 1, out="grey")
    grey = load_network("auxhead infer", tmp_path / "grey", None, None)
    assert grey.preprocessing == replace(wanted, crop=64, resize=73, mean=(0.449,), std=(0.226,))
    assert torch.equal(grey.network.backbone.conv1[0].weight, of_imagenet["conv1.0.weight"].sum(1, keepdim=True))
    answers = auxhead("infer", "grey", folder, "--device", "cpu", "--json", "x.jsonl")
    assert answers.exit_code == 0, answers.output


def test_a_backbone_of_timm(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    monkeypatch.chdir(tmp_path)
    folder = wide_folder(tmp_path / "wide", per_class=6)
    options = ("--data", folder, "--backbone", "timm:mobilenetv4_conv_small", "--epochs", 1, "--batch-size", 4)
    trained(*options, "--crop", 64, "--mean", "0.5", "--std", "0.25")
    loaded = load_network("auxhead infer", tmp_path / "out", None, None)
    usual = Preprocessing.of_timm(timm.create_model("mobilenetv4_conv_small"))
    assert loaded.preprocessing == replace(usual, crop=64, resize=73, mean=(0.5,), std=(0.25,))
    assert loaded.network.backbone.conv_stem.in_channels == 1
    answers = auxhead("infer", "out", folder, "--device", "cpu", "--json", "x.jsonl")
    assert answers.exit_code == 0, answers.output
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **_: pretrained and 1 / 0 or loaded)
    monkeypatch.setattr("auxhead.model.commands.train_network.named_backbone", lambda *_: loaded.network.backbone)
    refused = auxhead("train", *options, "--weights", "DEFAULT")
    assert_one_line_error(refused, "--weights: those of timm's mobilenetv4_conv_small (timm/mobilenetv4_conv_small.")
