"""Outputs of commands: files, links, pipes and devices that a user names, and what reaches the terminal."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, save_checkpoint
from auxhead.model.__main__ import app
from auxhead.model.basics.files import writing
from auxhead.model.basics.images import MEAN, STD
from auxhead.plots.records import COMMITTED
from PIL import Image
from support.command_line import assert_one_line_error, auxhead, plot, tune
from support.example_models import SmallNet
from typer.testing import CliRunner

MAKE = "from support.example_models import SmallNet\n\n\nmake = SmallNet\n"
OPTIONS = ("--checkpoint", "net", "--backbone", "outputs_net:make", "--device", "cpu")
#: A command that needs no PyTorch.
TABLE = [sys.executable, "-m", "auxhead.autotune", "table", str(COMMITTED / "h200/doctor.jsonl")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, with a checkpoint and a picture whose name holds what terminals obey."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(0)
    network = EarlyExitNetwork(SmallNet(), {"block0": FusedAuxHead(8, 5)}).eval()
    save_checkpoint(
        "net", network, classes=["café"] + [f"thé {number}" for number in range(4)], image_size=8, mean=MEAN, std=STD
    )
    Path("outputs_net.py").write_text(MAKE)
    Image.new("RGB", (8, 8)).save("a\x1b[31m\nb.png")
    return tmp_path


def picture() -> str:
    (found,) = Path().glob("*.png")
    return str(found)


def test_a_link_is_written_through_and_a_device_is_written_to(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    target, link = folder / "elsewhere" / "answers", folder / "link"
    target.write_text("of before")
    link.symlink_to(target)
    for out in (link, Path("/dev/null")):
        result = auxhead("infer", picture(), *OPTIONS, "--json", out)
        assert result.exit_code == 0, result.output
    assert link.is_symlink() and json.loads(target.read_text())["image"] == picture()
    assert os.path.exists("/dev/null") and not os.path.isfile("/dev/null")
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_a_pipe_gets_the_answers(folder: Path) -> None:
    os.mkfifo("pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    assert auxhead("infer", picture(), *OPTIONS, "--json", "pipe").exit_code == 0
    reader.join()
    assert json.loads(read[0])["exit"] == "classifier" and Path("pipe").is_fifo()


def test_standard_output_by_its_names_gets_the_answers_alone(folder: Path) -> None:
    for out in ("-", "/dev/stdout"):
        result = auxhead("infer", picture(), *OPTIONS, "--json", out)
        assert [json.loads(line)["image"] for line in result.stdout.splitlines()] == [picture()], result.output
    result = plot("perfetto", COMMITTED / "h200/overlap.jsonl", "--out", "/dev/stdout")
    assert json.loads(result.stdout)["traceEvents"], result.output


def test_an_output_that_takes_nothing_is_named(folder: Path) -> None:
    assert_one_line_error(auxhead("infer", picture(), *OPTIONS, "--json", "/dev/full"), "/dev/full: No space left")
    assert_one_line_error(auxhead("infer", picture(), *OPTIONS, "--json", "no/such"), "Error: no/such: No such file")
    (folder / "circle").symlink_to("circle")
    assert_one_line_error(auxhead("infer", picture(), *OPTIONS, "--json", "circle"), "Error: circle: Too many levels")
    calibrate = ("calibrate", "--data", ".", "--checkpoint", "circle", "--out")
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
    result = CliRunner(charset="ascii", env={"COLUMNS": "200"}).invoke(app, ["infer", picture(), *OPTIONS])
    assert result.exit_code == 0 and "th\\xe9" in result.stdout, result.output


def test_control_characters_of_names_do_not_reach_the_terminal(folder: Path) -> None:
    shown = auxhead("infer", picture(), *OPTIONS)
    assert shown.exit_code == 0 and "\x1b" not in shown.output and "a\\x1b[31m\\nb.png" in shown.output
    Path(picture()).write_bytes(b"no picture")
    assert_one_line_error(auxhead("infer", picture(), *OPTIONS), "a\\x1b[31m\\nb.png: cannot be read as an image")
    result = tune("table", "records\x1b]0;title\x07.jsonl")
    assert_one_line_error(result, "records\\x1b]0;title\\x07.jsonl: no such file")


def test_an_empty_name_is_refused(folder: Path) -> None:
    before = sorted(folder.iterdir())
    for run, arguments, named in (
        (auxhead, ("infer", "", *OPTIONS), "argument"),
        (auxhead, ("infer", "a.png", "--checkpoint", ""), "--checkpoint"),
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
