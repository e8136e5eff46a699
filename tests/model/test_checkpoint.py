"""Checkpoints: saving, loading, and files that are refused."""

import json
import math

import pytest
import torch
from auxhead.model import ExitRule
from auxhead.model.bad_input import BadInput
from auxhead.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from auxhead.model.demo.small_resnet import ARCHITECTURE, BLOCKS, small_early_exit_network
from torch import nn

#: The builders of known networks.
KNOWN = {ARCHITECTURE: small_early_exit_network}

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    network = small_early_exit_network(3)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):  # not what a fresh network has
            module.running_mean.normal_(0, 0.1)
    network.set_rules({"layer1.0": ExitRule(0.25, temperature=2.0), "layer2.1": ExitRule(0.5, enabled=False)})
    network.set_rules({"layer4.0": 0.1})
    return network.eval()


@pytest.fixture
def saved(tmp_path, network):
    checkpoint = Checkpoint(network, ("a", "b", "ç"), 16, accuracy={"test": 0.5})
    save_checkpoint(tmp_path, checkpoint, architecture=ARCHITECTURE)
    return tmp_path


@torch.no_grad()
def test_the_same_answers_come_back(saved, network):
    loaded = load_checkpoint(saved, KNOWN)
    assert loaded.classes == ("a", "b", "ç") and loaded.image_size == 16
    assert loaded.mean == loaded.std == (0.5, 0.5, 0.5) and loaded.accuracy == {"test": 0.5}
    assert not loaded.network.training
    for tap, mine, theirs in zip(BLOCKS, loaded.network.heads, network.heads, strict=True):
        for name in ("threshold", "criterion", "temperature", "enabled"):
            assert getattr(mine.rule, name) == getattr(theirs.rule, name), (tap, name)
    for name, value in network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], value), name
    x = torch.randn(5, 3, 16, 16)
    mine, theirs = loaded.network(x), network(x)
    assert torch.equal(mine.label, theirs.label) and torch.equal(mine.exit_index, theirs.exit_index)


def test_nothing_unfinished_is_left(saved):
    assert sorted(path.name for path in saved.iterdir()) == ["model.json", "model.safetensors"]


def test_an_interrupted_save_leaves_no_description_of_other_parameters(saved, network, monkeypatch):
    def fails(*_):
        raise OSError("no space left")

    monkeypatch.setattr("auxhead.model.checkpoint.write_json", fails)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(saved, Checkpoint(network, ("x", "y", "z"), 32), architecture=ARCHITECTURE)
    with pytest.raises(BadInput, match=r"has no model\.json"):
        load_checkpoint(saved, KNOWN)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors"])
def test_missing_files(saved, name):
    (saved / name).unlink()
    with pytest.raises(BadInput, match=f"--checkpoint: .* has no {name}"):
        load_checkpoint(saved, KNOWN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, wants 1"),
        ({"architecture": "vgg"}, "has architecture 'vgg', wants 'resnet18_small'"),
        ({"image_size": "16"}, "has it in another form"),
        ({"std": [0.5, 0.5, 0.0]}, "has it in another form"),
        ({"mean": [0.5, 0.5, math.nan]}, "has it in another form"),
        ({"surprise": 1}, "has it in another form"),
        ({"taps": list(BLOCKS[1:])}, "has it in another form"),
        ({"rules": [1]}, "has it in another form"),
        ({"classes": ["a", "b"]}, "does not hold the parameters"),
        ({"rules": {tap: {"threshold": 1.5} for tap in BLOCKS}}, "has a rule that cannot be used: threshold: got 1.5"),
        ({"rules": {tap: {"limit": 0.5} for tap in BLOCKS}}, "has a rule that cannot be used"),
    ],
    ids=[
        "format",
        "architecture",
        "size",
        "std",
        "nan",
        "extra-key",
        "taps",
        "rules",
        "classes",
        "threshold",
        "rule-key",
    ],
)
def test_descriptions_that_do_not_fit(saved, change, message):
    path = saved / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadInput, match=message):
        load_checkpoint(saved, KNOWN)


@pytest.mark.parametrize(("name", "content"), [("model.json", "{"), ("model.json", "[]"), ("model.safetensors", "x")])
def test_damaged_files(saved, name, content):
    (saved / name).write_text(content)
    with pytest.raises(BadInput, match=name):
        load_checkpoint(saved, KNOWN)
