"""``auxhead export``: files of a checkpoint's network, and what is refused."""

import json
import logging
from pathlib import Path

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, ModuleHead, save_checkpoint
from support.command_line import assert_one_line_error, auxhead
from support.decided import assert_answers, opened
from support.example_models import SmallNet
from support.exported import first_sure, read_description, run_stages
from support.pictures import whole
from torch import nn


@pytest.fixture
def network() -> EarlyExitNetwork:
    network = EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5)}, rules=0.25).eval()
    network.preprocessing = whole(16)
    return network


@pytest.fixture
def checkpoint(network: EarlyExitNetwork, users_folder: Path) -> Path:
    """Of a network whose backbone ``small_nets:make`` makes, in the current directory."""
    save_checkpoint(users_folder / "net", network, backbone="small_nets:make")
    (users_folder / "small_nets.py").write_text("from support.example_models import SmallNet\n\n\nmake = SmallNet\n")
    return users_folder / "net"


def test_stages(network, checkpoint, tmp_path):
    x, description = torch.randn(16, 3, 16, 16), tmp_path / "stages" / "stages.json"
    wanted = network(x)
    result = auxhead("export", checkpoint, tmp_path / "stages", "--backbone", "small_nets:make", "--stages")
    assert result.exit_code == 0 and not result.stderr, result.output
    off, saved = result.output.splitlines()
    assert off.startswith("Off from the network: ") and off.endswith(" at most (torch.export.load).")
    assert saved.startswith("Saved: ") and saved.endswith(str(description))
    assert json.loads(description.read_text())["preprocessing"] == whole(16).as_json()
    label, exit_index = first_sure(description, run_stages(description, x))
    assert torch.equal(label, wanted.label) and torch.equal(exit_index, wanted.exit_index)


def test_the_end_of_a_name_tells_the_format_and_contradicts_no_other(checkpoint, tmp_path, caplog):
    onnx = pytest.importorskip("onnx")
    options = ("--backbone", "small_nets:make")
    assert auxhead("export", checkpoint, "exits.onnx", *options).exit_code == 0
    assert read_description(tmp_path / "exits.onnx.json")["files"][0]["file"] == "exits.onnx"
    onnx.checker.check_model(tmp_path / "exits.onnx")
    for out, format, wanted in (
        ("x.onnx", "pt2", "wants 'onnx' or a name that ends in .pt2"),
        ("x.pt2", "onnx", "'pt2'"),
    ):
        result = auxhead("export", checkpoint, out, "--format", format, *options)
        assert_one_line_error(result, f"format: got {format!r} for {out}, wants ")
        assert wanted in result.stderr and not (tmp_path / out).exists()
    assert auxhead("export", checkpoint, "onnx.v2", *options).exit_code == 0
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING], "of a temporary file, say"
    torch.export.load(tmp_path / "onnx.v2")


def test_what_is_refused(network, checkpoint, tmp_path):
    make = ("--backbone", "small_nets:make")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert_one_line_error(auxhead("export", "nowhere", "x.pt2"), "checkpoint: nowhere has no model.json")
    assert_one_line_error(
        auxhead("export", checkpoint, "x.pt2"),
        f"what makes its backbone: auxhead export {checkpoint} --backbone small_nets:make",
    )
    for out in ("net", "small_nets.py"):
        for more in ([], ["--stages"]):
            result = auxhead("export", checkpoint, out, *make, *more)
            assert_one_line_error(result, f"OUT: {out} is there already, wants the name of something new")
    network.preprocessing = None
    save_checkpoint(tmp_path / "plain", network, backbone="small_nets:make")
    assert_one_line_error(auxhead("export", "plain", "x.pt2", *make), "checkpoint: was saved without preprocessing")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == sorted([*before, "plain"])


def test_a_checkpoint_whose_head_is_a_module_of_the_users(checkpoint, tmp_path):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh(), nn.Linear(8, 5))
    network = EarlyExitNetwork(SmallNet(), {"block0": ModuleHead(head)}, example_input=torch.zeros(2, 3, 16, 16)).eval()
    network.preprocessing = whole(16)
    save_checkpoint(tmp_path / "module", network)
    (tmp_path / "small_nets.py").write_text(
        "from support.example_models import SmallNet\nfrom torch import nn\n\n\nmake = SmallNet\n\n\n"
        "def heads():\n    parts = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh(), nn.Linear(8, 5)\n"
        "    return {'block0': nn.Sequential(*parts)}\n"
    )
    options = ("module", "x.pt2", "--backbone", "small_nets:make")
    assert_one_line_error(auxhead("export", *options), "--modules: got none for the head at 'block0' in module")
    assert auxhead("export", *options, "--modules", "small_nets:heads").exit_code == 0
    x = torch.randn(3, 3, 16, 16)
    found = torch.export.load(tmp_path / "x.pt2").module()(x)
    for one, wanted in zip(found, network.logits(x), strict=True):
        torch.testing.assert_close(one, wanted)


@pytest.mark.usefixtures("without_interpreter")
def test_a_decision(network, checkpoint, tmp_path):
    x = torch.randn(8, 3, 16, 16)
    options = ("--backbone", "small_nets:make", "--decide")
    result = auxhead("export", checkpoint, "decision.pt2", *options)
    assert result.exit_code == 0 and not result.stderr, result.output
    assert "leaving at each of 2 exits (torch.export.load)." in result.output
    assert result.output.splitlines()[-1] == "Saved: decision.pt2, decision.pt2.json"
    assert json.loads((tmp_path / "decision.pt2.json").read_text())["preprocessing"] == whole(16).as_json()
    assert_answers(opened(tmp_path / "decision.pt2"), network, x)
    result = auxhead("export", checkpoint, "both", *options, "--stages")
    assert_one_line_error(result, "--decide: got --stages, too, wants one of them: a decision is one file")
    assert not (tmp_path / "both").exists()
