"""``auxhead train`` as users type it: networks of theirs and of torchvision, images, files, refusals."""

import json
import sys

import pytest
import torch
import torchvision
from auxhead.model import accuracy_of_exits, load_checkpoint
from auxhead.model.commands.processes import process_group
from auxhead.model.commands.train_run import show_steps
from auxhead.model.training.batches import PixelBatches
from auxhead.model.training.data_sets import load_folder, read_splits
from auxhead.model.training.train import Step, _TrainingLoop
from support.command_line import assert_one_line_error, auxhead
from support.pictures import write_image_folder
from support.trainable import Blocks, assert_equal_bits, tensors

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

def grey():
    network, _ = make()
    network.backbone.first[0] = torch.nn.Conv2d(1, 8, 3)
    return network, torch.zeros(2, 1, 8, 8)
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
    """The table at the end, accuracy by exit as printed."""
    lines = [line.strip("│ ").split("│") for line in result.output.splitlines() if line.startswith("│")]
    return {name.strip(): share.strip() for name, share in lines}


def test_a_network_of_yours_on_a_folder_of_pictures(module, tmp_path):
    folder = write_image_folder(tmp_path / "stripes", per_class=20)
    result = trained("--data", folder, "--model", f"{module}:for_stripes", "--epochs", 6, "--learning-rate", 0.02)
    backbone = Blocks()
    backbone.fc = torch.nn.Linear(16, 2)
    loaded = load_checkpoint("out", backbone)
    assert loaded.classes == ("lying", "standing") and loaded.image_size == 16
    assert json.loads((tmp_path / "out" / "model.json").read_text())["backbone"] == f"{module}:for_stripes"
    _, splits = read_splits(load_folder(folder), 16, 0, skip_damaged=False, tell=print, on_image=lambda: None)
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
        "--image-size", 32, "--epochs", 1, "--batch-size", 4,
    )  # fmt: skip
    assert list(rows(result)) == ["stage2", "stage3.0", "classifier"]
    loaded = load_checkpoint("out", torchvision.models.shufflenet_v2_x0_5(num_classes=2))
    assert loaded.network.taps == ("stage2", "stage3.0") and loaded.image_size == 32


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
        "--image-size: vit_b_16 cannot take 32 pixels: Wrong image height! Expected",
    ),
    "untrained": (("--backbone", "resnet18", "--tap", "layer1", "--method", "heads"), "--method: heads wants a back"),
    "classes": (("--model", "my_model:for_stripes"), "my_model:for_stripes has 2 classes, wants 10"),
    "grey": (("--model", "my_model:grey"), "returned a batch [2, 1, 8, 8], wants [N, 3, size, size]"),
    "nothing to resume": (
        ("--model", "my_model:make", "--epochs", "1", "--resume"),
        "--resume: auxhead-train has no training.safetensors",
    ),
    "two sources": (("--model", "my_model:make", "--data", "x", "--dataset", "digits"), "--data: cannot be given"),
}


def test_what_cannot_be_is_refused_in_one_line(module, tmp_path, monkeypatch):
    for options, message in REFUSED.values():
        assert_one_line_error(auxhead("train", "--device", "cpu", "--image-size", "32", *options), message)
    monkeypatch.setattr("auxhead.model.commands.train_run.load_source", lambda *_: pytest.fail("that takes its time"))
    (tmp_path / "file").touch()
    options = ("--model", "my_model:make", "--epochs", "1", "--image-size", "32", "--out", tmp_path / "file" / "out")
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
