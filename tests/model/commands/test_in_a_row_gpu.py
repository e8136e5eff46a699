"""``auxhead train``, ``calibrate``, ``infer``, ``export`` one after the other on a GPU, in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.example_models import needs_gpu

pytestmark = needs_gpu

DEVICE = "cuda"
COLOURS = {"blue": (60, 60, 190), "green": (60, 190, 60), "red": (190, 60, 60)}
PER_CLASS = 120


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``pictures``, one folder a class: noise in the colour of the class, which is easy to tell."""
    folder = tmp_path_factory.mktemp("workplace")
    generator = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / "pictures" / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            pixels = np.array(colour) + generator.integers(-50, 50, (32, 32, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "pictures" / name / f"{number}.png")
    return folder


def auxhead(where: Path, *arguments: object) -> str:
    """Run a command as a user does; returns what it said."""
    command = [sys.executable, "-m", "auxhead.model", *map(str, arguments)]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def calibrated(workplace: Path) -> Path:
    """The workplace with the checkpoints ``trained`` and ``calibrated``."""
    said = auxhead(
        workplace, "train", "--data", "pictures", "--backbone", "resnet18", "--crop", 32, "--epochs", 5,
        "--device", DEVICE, "--out", "trained",
    )  # fmt: skip
    assert "of the work" in said, "heads are placed by themselves, and it says where"
    auxhead(
        workplace, "calibrate", "trained", "--data", "pictures", "--max-accuracy-drop", 0.1,
        "--device", DEVICE, "--out", "calibrated",
    )  # fmt: skip
    return workplace


def answers(where: Path, runner: str, device: str) -> list[dict]:
    """What ``auxhead infer`` writes for all pictures, a dict each."""
    out = f"{runner}-{device}.jsonl"
    auxhead(
        where, "infer", "calibrated", "pictures", "--runner", runner, "--batch", 16, "--device", device, "--json", out,
    )  # fmt: skip
    return [json.loads(line) for line in (where / out).read_text().splitlines()]


@pytest.fixture(scope="module")
def on_the_cpu(calibrated: Path) -> list[dict]:
    return answers(calibrated, "eager", "cpu")


def test_calibrate_writes_its_folder(calibrated: Path) -> None:
    written = {path.name for path in (calibrated / "calibrated").iterdir()}
    assert written >= {"model.json", "report.json", "calibration.png", "calibration.svg"}
    report = json.loads((calibrated / "calibrated" / "report.json").read_text())
    assert report["full_accuracy"] > 0.8 and report["accuracy"] > 0.8, "of images that training has not seen"
    assert report["bound"]["reachable"] and report["exits"][-1]["share"] < 1.0, "some leave early"


def test_on_the_cpu_pictures_are_told_apart(on_the_cpu: list[dict]) -> None:
    right = [Path(one["image"]).parent.name == one["class"] for one in on_the_cpu]
    assert len(right) == len(COLOURS) * PER_CLASS and sum(right) > 0.8 * len(right)


@pytest.mark.parametrize("runner", ["eager", "auto", "overlapped", "polled", "gated"])
def test_every_runner_writes_what_the_cpu_writes(calibrated: Path, on_the_cpu: list[dict], runner: str) -> None:
    """But for samples within rounding of a threshold, and convolutions in TF32."""
    found = answers(calibrated, runner, DEVICE)
    assert [one["image"] for one in found] == [one["image"] for one in on_the_cpu]
    for part, least in (("class", 0.95), ("exit", 0.9)):
        same = [one[part] == other[part] for one, other in zip(found, on_the_cpu, strict=True)]
        assert sum(same) >= least * len(same), part


def test_an_export_loads_and_has_the_rules_of_the_report(calibrated: Path) -> None:
    auxhead(calibrated, "export", "calibrated", "exits.pt2")
    exits = json.loads((calibrated / "exits.pt2.json").read_text())["exits"]
    said = torch.export.load(calibrated / "exits.pt2").module()(torch.randn(3, 3, 32, 32))
    assert len(said) == len(exits) > 1 and all(logits.shape == (3, len(COLOURS)) for logits in said)
    report = json.loads((calibrated / "calibrated" / "report.json").read_text())
    thresholds = [one["threshold"] for one in report["exits"][:-1]]
    assert [one["rule"]["threshold"] for one in exits[:-1]] == [1.0 if one is None else one for one in thresholds]
