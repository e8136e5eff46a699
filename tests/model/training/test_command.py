"""``auxhead train`` as users type it: networks of theirs and of torchvision, images, files, refusals."""

import json
import sys

import pytest
import torch
import torchvision
from auxhead.model import accuracy_of_exits, load_checkpoint
from auxhead.model.basics.images import FORMATS
from auxhead.model.commands.processes import process_group
from auxhead.model.commands.train_run import show_steps
from auxhead.model.training.batches import PixelBatches
from auxhead.model.training.data_sets import read_splits
from auxhead.model.training.sources import load_source
from auxhead.model.training.training_loop import Step, TrainingLoop
from support.command_line import assert_one_line_error, auxhead
from support.pictures import write_image_folder
from support.trainable import Blocks, assert_equal_bits, tensors
from support.training_command import rows, trained

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


def test_the_help_names_all_kinds_of_data():
    shown = " ".join(auxhead("train", "--help").output.replace("│", " ").split())
    assert f"Images are {', '.join(FORMATS)}." in shown and ".csv or .tsv" in shown and "or one of them" in shown


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
    assert [images for images, _ in told] == [6, 2, 2, 2] and Loss.reads == 2
    assert [remark for _, remark in told] == [f"epoch {epoch} of 3, loss 1.25" for epoch in (2, 2, 3, 3)]


def test_a_loss_that_is_no_number_leaves_the_best_epoch_as_the_checkpoint(module, monkeypatch):
    options = ("--model", f"{module}:make", "--epochs", 3, "--batch-size", 256)
    learn = TrainingLoop._learn

    def diverge(run, *batch):
        return learn(run, *batch) * (torch.nan if len(run.state.epochs) == 1 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_learn", diverge)
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
    "gradients of a frozen backbone": (
        ("--backbone", "resnet18", "--weights", "x.pth", "--method", "heads", "--gradients", "depth"),
        "--gradients: depth does nothing with --method heads, whose exits share nothing that learns",
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
