"""``auxhead train`` as users type it: networks of theirs and of torchvision, images, files, refusals."""

import json
import sys
from dataclasses import replace
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision
from auxhead.model import Preprocessing, accuracy_of_exits, load_checkpoint
from auxhead.model.commands.processes import process_group
from auxhead.model.commands.train_run import show_steps
from auxhead.model.commands.user_model import load_network
from auxhead.model.training.batches import PixelBatches
from auxhead.model.training.data_sets import read_splits
from auxhead.model.training.sources import load_source
from auxhead.model.training.train import Step, _TrainingLoop
from PIL import Image
from safetensors.torch import save_file
from support.command_line import assert_one_line_error, auxhead
from support.pictures import stripes, write_image_folder
from support.trainable import Blocks, assert_equal_bits, tensors
from torchvision.transforms._presets import ImageClassification

pytestmark = pytest.mark.usefixtures("without_interpreter")

SOURCE = """
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from support.trainable import Blocks, trainable

def make(classes=10, size=8):
    heads = {"first": FusedAuxHead(None, classes, dropout=0.1), "second": FusedAuxHead(None, classes)}
    backbone = Blocks()
    backbone.fc = torch.nn.Linear(16, classes)
    return EarlyExitNetwork(backbone, heads), torch.zeros(2, 3, size, size)

def for_stripes():
    return make(2, 16)

def of_channels(channels):
    network, _ = make()
    network.backbone.first[0] = torch.nn.Conv2d(channels, 8, 3)
    return network, torch.zeros(2, channels, 8, 8)

def flattened():
    network, x = make()
    network.backbone.fc = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 10))
    first = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16))
    return EarlyExitNetwork(torch.nn.Sequential(first, torch.nn.Linear(16, 10)), {"0": FusedAuxHead(16, 10)}), x

def grey():
    return of_channels(1)

def infrared():
    return of_channels(4)
"""


@pytest.fixture
def module(users_folder):
    """A module of the user's in the current directory; returns its name."""
    (users_folder / "my_model.py").write_text(SOURCE)
    return "my_model"


def trained(*options, out="out"):
    result = auxhead("train", "--device", "cpu", "--out", out, *options)
    assert result.exit_code == 0, result.output + result.stderr
    return result


def rows(result):
    """The table at the end, accuracy by exit as printed; exits are counted from 0."""
    lines = [line.strip("│ ").split("│") for line in result.output.splitlines() if line.startswith("│")]
    assert [name.split(":")[0].strip() for name, _ in lines] == [str(index) for index in range(len(lines))]
    return {name.split(":")[1].strip(): share.strip() for name, share in lines}


def test_a_network_of_yours_on_a_folder_of_pictures(module, tmp_path):
    folder = write_image_folder(tmp_path / "stripes", per_class=20)
    result = trained("--data", folder, "--model", f"{module}:for_stripes", "--epochs", 6, "--learning-rate", 0.02)
    backbone = Blocks()
    backbone.fc = torch.nn.Linear(16, 2)
    loaded = load_checkpoint("out", backbone)
    assert loaded.classes == ("lying", "standing") and loaded.preprocessing.crop == 16
    assert json.loads((tmp_path / "out" / "model.json").read_text())["backbone"] == f"{module}:for_stripes"
    _, splits = read_splits(load_source(folder), loaded.preprocessing, 0)
    validation = PixelBatches(splits.validation, 8, device=torch.device("cpu"))
    wanted = dict(zip(["first", "second", "classifier"], accuracy_of_exits(loaded.network, validation), strict=True))
    found = rows(result)
    assert {name: f"{share:.1%}" for name, share in wanted.items()} == found
    assert {f"validation of {name}": share for name, share in wanted.items()} == pytest.approx(dict(loaded.accuracy))
    assert wanted["second"] > 0.8
    assert all(head.rule.threshold == 1.0 for head in loaded.network.fused_heads)
    assert "No head exits yet" in result.output


def test_the_digits_by_another_method(module):
    result = trained("--model", f"{module}:make", "--method", "heads", "--epochs", 1, "--precision", "bfloat16")
    assert "2 heads, heads, on cpu" in result.output
    assert list(rows(result)) == ["first", "second", "classifier"]


def test_a_backbone_of_torchvision_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_image_folder(tmp_path / "stripes", per_class=6)
    result = trained(
        "--data", folder, "--backbone", "shufflenet_v2_x0_5", "--tap", "stage2", "--tap", "stage3.0",
        "--crop", 32, "--epochs", 1, "--batch-size", 4,
    )  # fmt: skip
    assert list(rows(result)) == ["stage2", "stage3.0", "classifier"]
    loaded = load_checkpoint("out", torchvision.models.shufflenet_v2_x0_5(num_classes=2))
    assert loaded.network.taps == ("stage2", "stage3.0") and loaded.preprocessing.crop == 32


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
    assert f"With weights w.{form}; the classifier is theirs, of as many classes." in result.output
    loaded = load_checkpoint("out", torchvision.models.shufflenet_v2_x0_5(num_classes=2))
    for name, value in loaded.network.backbone.state_dict().items():
        assert torch.equal(value, state[name]), name
    x = torch.randn(3, 3, 32, 32)
    assert torch.equal(loaded.network.logits(x)[-1], pretrained(x))
    assert accuracies_of("out", folder, torchvision.models.shufflenet_v2_x0_5(num_classes=2))[-1] > 0.9
    assert "trained on images that nobody has noted" in str(loaded.network.learned_from.unknown)


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
    grey = load_network(tmp_path / "grey", None, None)
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
    loaded = load_network(tmp_path / "out", None, None)
    usual = Preprocessing.of_timm(timm.create_model("mobilenetv4_conv_small"))
    assert loaded.preprocessing == replace(usual, crop=64, resize=73, mean=(0.5,), std=(0.25,))
    assert loaded.network.backbone.conv_stem.in_channels == 1
    answers = auxhead("infer", "out", folder, "--device", "cpu", "--json", "x.jsonl")
    assert answers.exit_code == 0, answers.output
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **_: pretrained and 1 / 0 or loaded)
    monkeypatch.setattr("auxhead.model.commands.train_network.named_backbone", lambda *_: loaded.network.backbone)
    refused = auxhead("train", *options, "--weights", "DEFAULT")
    assert_one_line_error(refused, "--weights: those of timm's mobilenetv4_conv_small (timm/mobilenetv4_conv_small.")


def test_a_stopped_command_goes_on(module, tmp_path, monkeypatch):
    options = ("--model", f"{module}:make", "--epochs", 2, "--batch-size", 256)
    trained(*options, out="whole")

    def stop(step):
        if step.epoch == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("auxhead.model.commands.train_run.show_steps", lambda *_: stop)
        assert auxhead("train", "--device", "cpu", "--out", "out", *options).exit_code == 130
    assert not (tmp_path / "out" / "model.json").exists()
    result = trained(*options, "--resume")
    assert "training, all epochs: 2,048 of 2,048 images, epoch 2 of 2" in result.output
    states = [load_checkpoint(name, Blocks()).network for name in ("whole", "out")]
    assert_equal_bits(*(tensors(network) for network in states))


def test_progress_names_the_epoch_of_each_step_and_reads_a_loss_now_and_then(monkeypatch) -> None:
    monkeypatch.setattr("auxhead.model.commands.train_run._BETWEEN_LOOKS", 3600.0)

    class Loss:
        reads = 0

        def item(self) -> float:
            Loss.reads += 1
            return 1.25

    told: list[tuple[int, str]] = []
    on_step = show_steps(lambda images, remark: told.append((images, remark)), 3, 4)
    for epoch in (1, 1, 2, 2):  # the first was before, in a training that this resumes
        on_step(Step(epoch, 2, Loss()))
    assert [images for images, _ in told] == [6, 2, 2, 2] and Loss.reads == 1
    assert [remark for _, remark in told] == [f"epoch {epoch} of 3, loss 1.25" for epoch in (2, 2, 3, 3)]


def test_a_loss_that_is_no_number_leaves_the_best_epoch_as_the_checkpoint(module, monkeypatch):
    options = ("--model", f"{module}:make", "--epochs", 3, "--batch-size", 256)
    learn = _TrainingLoop._learn

    def diverge(run, *batch):
        return learn(run, *batch) * (torch.nan if len(run.state.epochs) == 1 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(_TrainingLoop, "_learn", diverge)
        result = auxhead("train", "--device", "cpu", "--out", "out", *options)
    assert_one_line_error(result, "learning_rate: got 0.001, with which the loss is nan in batch 1 of epoch 2")
    assert "As after epoch 1 of 1, the best" in result.output
    load_checkpoint("out", Blocks())
    again = trained(*options, "--resume", "--learning-rate", 1e-4)
    assert "As after epoch" in again.output and "of 3, the best" in again.output


def test_tensorboard_gets_every_epoch(module, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        result = auxhead("train", "--model", f"{module}:make", "--epochs", 1, "--tensorboard", "--device", "cpu")
    assert_one_line_error(result, "--tensorboard: it is not installed: pip install 'auxhead[tensorboard]'")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trained("--model", f"{module}:make", "--epochs", 2, "--batch-size", 256, "--tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    names = ["accuracy/first", "accuracy/second", "accuracy/classifier", "learning_rate", "loss"]
    assert sorted(events.Tags()["scalars"]) == sorted(names)
    assert [event.step for event in events.Scalars("loss")] == [0, 1]


REFUSED = {
    "no network": ((), "--model: wants a network, by either --model or --backbone"),
    "two networks": (("--model", "a:b", "--backbone", "resnet18"), "by either --model or --backbone"),
    "taps of yours": (("--model", "my_model:make", "--tap", "first"), "--tap: belongs to --backbone"),
    "no such layer": (("--backbone", "resnet18", "--tap", "layer9"), "the backbone has no layer 'layer9'"),
    "no such network": (("--backbone", "resnet19", "--tap", "layer1"), "--backbone: got 'resnet19'"),
    "no classifier": (("--backbone", "fcn_resnet50"), "--backbone: got 'fcn_resnet50', wants a classifier"),
    "a function": (("--backbone", "my_model:make"), "; a function of yours is --model"),
    "too small": (
        ("--backbone", "vit_b_16"),
        "--crop: vit_b_16 cannot take 32 pixels: Wrong image height! Expected",
    ),
    "untrained": (("--backbone", "resnet18", "--tap", "layer1", "--method", "heads"), "--method: heads wants a back"),
    "classes": (("--model", "my_model:for_stripes"), "my_model:for_stripes has 2 classes, wants 10"),
    "infrared": (("--model", "my_model:infrared"), "returned a batch [2, 4, 8, 8], wants [N, 3, size, size], or [N, 1"),
    "colours for grey": (("--model", "my_model:grey", "--channels", 3), "--channels: got 3, wants 1, as my_model:grey"),
    "weights of yours": (("--model", "my_model:make", "--weights", "DEFAULT"), "--weights: belongs to --backbone"),
    "no such weights": (("--backbone", "resnet18", "--weights", "V3"), "got 'V3', wants DEFAULT, IMAGENET1K_V1, or a"),
    "no file": (
        ("--backbone", "resnet18", "--weights", "x.pth"),
        "--weights: x.pth is not there, wants a .saf",
    ),
    "their input": (("--backbone", "googlenet", "--weights", "DEFAULT"), "those of googlenet want another input"),
    "twice resized": (("--backbone", "resnet18", "--squash", "--resize", 64), "--squash: goes without --resize, wants"),
    "too small a side": (("--backbone", "resnet18", "--resize", 16), "--resize: got 16, wants 32 at least, as crop is"),
    "one number": (
        ("--backbone", "resnet18", "--std", "0.5", "--channels", 3),
        "--std: got 1 numbers, wants 3, as -",
    ),
    "three numbers": (("--backbone", "resnet18", "--mean", "1,2,3", "--channels", 1), "--mean: got 3 numbers, wants 1"),
    "numbers of two": (
        ("--backbone", "resnet18", "--mean", "0.5", "--std", "1,2,3"),
        "--std: got 3 numbers, wants 1",
    ),
    "no such tag": (("--backbone", "timm:resnet18.none"), "--backbone: timm:resnet18.none: Invalid pretrained tag"),
    "another crop": (("--backbone", "timm:tf_efficientnetv2_b3"), "tf_efficientnetv2_b3: its data config has "),
    "flattened": (("--model", "my_model:flattened"), "--crop: my_model:flattened cannot take 32 pixels: mat1 and mat2"),
    "changed images": (
        ("--backbone", "resnet18", "--weights", "x.pth", "--method", "heads", "--augment", "standard"),
        "--augment: does nothing with --method heads, which reads each image once",
    ),
    "two channels": (("--backbone", "resnet18", "--channels", 2), "--channels: got 2, wants 3 for RGB or 1 for grey"),
    "two numbers": (("--backbone", "resnet18", "--mean", "0.5,0.5"), "--mean: got (0.5, 0.5), wants three numbers"),
    "no number": (("--backbone", "resnet18", "--std", "0.5,0,1"), "--std: got [0.5, 0.0, 1.0], wants numbers greater"),
    "no such model": (
        ("--backbone", "timm:resnet19"),
        "--backbone: got 'timm:resnet19', which this timm has not; c",
    ),
    "a hub": (("--backbone", "timm:hf-hub:me/net"), "--backbone: got 'timm:hf-hub:me/net', which this t"),
    "nothing to resume": (
        ("--model", "my_model:make", "--epochs", "1", "--resume"),
        "--resume: auxhead-train has no training.safetensors",
    ),
}


def test_what_cannot_be_is_refused_in_one_line(module, tmp_path, monkeypatch):
    for options, message in REFUSED.values():
        assert_one_line_error(auxhead("train", "--device", "cpu", "--crop", "32", *options), message)
    monkeypatch.setattr("auxhead.model.commands.train_run.load_source", lambda *_: pytest.fail("that takes its time"))
    (tmp_path / "file").touch()
    options = ("--model", "my_model:make", "--epochs", "1", "--crop", "32", "--out", tmp_path / "file" / "out")
    assert_one_line_error(auxhead("train", "--device", "cpu", *options), f"--out: {tmp_path / 'file'} is a file, wants")


def test_a_picture_that_cannot_be_read_leaves_no_folder_for_results(module, tmp_path):
    folder = write_image_folder(tmp_path / "stripes", per_class=6)
    (folder / "lying" / "zz.png").write_bytes(b"no picture")
    options = ("--data", folder, "--model", f"{module}:for_stripes", "--epochs", 1, "--out", "out")
    assert_one_line_error(
        auxhead("train", "--device", "cpu", *options), "--skip-damaged leaves out what cannot be read"
    )
    assert not (tmp_path / "out").exists()


def test_torchruns_processes_find_each_other(monkeypatch):
    """As it starts them: by variables of the environment; the group is gone at the end."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("needs gloo")
    variables = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with process_group("cpu") as where:
        assert where == torch.device("cpu") and torch.distributed.get_world_size() == 1
    assert not torch.distributed.is_initialized()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    with process_group("cpu"):
        assert not torch.distributed.is_initialized()
