"""The script of docs/export.md, and a .pt2 file, answer for pictures as the network does where auxhead is not there."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from auxhead.model import Preprocessing, export_decision
from auxhead.model.basics.images import open_image
from PIL import Image
from support.decided import grey_network, grey_pictures, leave_everywhere, page_script

pytestmark = pytest.mark.usefixtures("without_interpreter")

PICTURES = 500
#: Runs the script on every picture, and the .pt2 file on some of what the script has read.
WITHOUT_AUXHEAD = f"""
import json, sys

sys.modules["auxhead"] = None  # an import of it fails
import answer

found = [answer.answer(f"{{number}}.png") for number in range({PICTURES})]
assert "torch" not in sys.modules
import torch

module = torch.export.load("decision.pt2").module()
with torch.no_grad():
    answers = [module(torch.from_numpy(answer.read(f"{{number}}.png"))) for number in range(50)]
print(json.dumps([found, [[int(label), float(confidence), int(at)] for label, confidence, _, at in answers]]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a network's decision, pictures that it leaves at every exit, and the script."""
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("deployed")
    network, prepare = grey_network("entropy", "patience")
    pictures = grey_pictures(PICTURES)
    x = torch.stack([prepare.pipeline()(each) for each in pictures])
    leave_everywhere(network, x)
    for format in ("onnx", "pt2"):
        export_decision(network, x[:1], folder / f"decision.{format}", classes=[f"class {k}" for k in range(10)])
    for number, each in enumerate(pictures):
        each.save(folder / f"{number}.png")
    pictures[0].save(folder / "picture.png")
    (folder / "answer.py").write_text(page_script())
    wanted = network(x)
    torch.save([wanted.label, wanted.confidence, wanted.exit_index], folder / "wanted.pt")
    return folder


def test_the_script_answers_as_the_network_for_each_picture(folder: Path) -> None:
    label, confidence, exit_index = torch.load(folder / "wanted.pt")
    assert exit_index.unique().tolist() == [0, 1, 2]
    path = os.pathsep.join(filter(None, sys.path))  # with where packages are, some of which may be elsewhere
    command = [sys.executable, "-c", WITHOUT_AUXHEAD]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    by_script, by_program = json.loads(done.stdout.splitlines()[-1])
    names, confidences, taps = zip(*by_script, strict=True)
    assert list(names) == [f"class {k}" for k in label.tolist()]
    assert list(taps) == [("0", "1", "the classifier")[k] for k in exit_index.tolist()]
    torch.testing.assert_close(torch.tensor(confidences), confidence, rtol=1e-4, atol=1e-5)
    labels, confidences, exits = zip(*by_program, strict=True)
    assert list(labels) == label[:50].tolist() and list(exits) == exit_index[:50].tolist()
    torch.testing.assert_close(torch.tensor(confidences), confidence[:50], rtol=1e-4, atol=1e-5)


def test_the_script_reads_pictures_as_the_network_does(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    script: dict = {"__name__": "answer"}
    exec(page_script(), script)
    prepares = (
        Preprocessing(crop=24, resize=27),
        Preprocessing(crop=15, resize=16, interpolation="bicubic", mean=(0.5,), std=(0.25,)),
        Preprocessing(crop=20, resize=None, interpolation="lanczos"),
    )
    generator = np.random.default_rng(0)
    for prepare, mode, size in product(prepares, ("RGB", "L", "P"), ((50, 37), (31, 64), (24, 24))):
        script["told"]["preprocessing"] = prepare.as_json()
        picture = Image.fromarray(generator.integers(0, 256, (*reversed(size), 3), dtype=np.uint8)).convert(mode)
        exif = Image.Exif()
        exif[0x0112] = 6  # lies on its side
        picture.save(tmp_path / "one.png", exif=exif)
        wanted = prepare.pipeline()(open_image(tmp_path / "one.png"))[None]
        found = torch.from_numpy(script["read"](tmp_path / "one.png"))
        torch.testing.assert_close(found, wanted, msg=lambda said, of=(prepare, mode, size): f"{of}: {said}")
