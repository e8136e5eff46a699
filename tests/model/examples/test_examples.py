"""The examples run as they are, on each device, and print what they promise."""

import importlib
import re
import runpy
import sys

import pytest
import torch
from support.pictures import write_image_folder

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture
def printed(device, capsys):
    """Runs an example's ``main`` and returns its lines."""

    def run(name):
        importlib.import_module(f"auxhead.model.examples.{name}").main(device.type)
        return capsys.readouterr().out

    return run


def test_swapped_heads_answer_as_before(printed):
    said = printed("swap_heads")
    assert re.search(
        r"^swapped: +exit1, exit3\nleft alone: exit2 is a PooledLinear .*\nswapped: +exit2", said, re.MULTILINE
    )
    differences = re.findall(r"^exit(\d): .* differ by at most (\S+) from before$", said, re.MULTILINE)
    assert [number for number, _ in differences] == ["1", "2", "3"]
    assert all(float(difference) < 1e-5 for _, difference in differences)
    assert "exit1: 4 of 8 images have a confidence above" in said  # the median


def test_a_network_is_trained_saved_loaded_and_run(printed, device):
    said = printed("train_save_load_run")
    same, right = (float(one) for one in re.findall(r"([\d.]+)% (?:answered as before|right$)", said, re.MULTILINE))
    # by graphs in batches of 32, not of 397: rounding may move a sample over a threshold
    assert same == 100.0 if device.type == "cpu" else same >= 99.0
    assert right >= 95.0
    left = {tap: int(count) for count, tap in re.findall(r"(\d+) images left at (\w+),", said)}
    assert list(left) == ["block1", "block2", "classifier"] and sum(left.values()) == 397
    assert left["block1"] + left["block2"] > 200


def test_without_a_folder_it_says_how_it_is_run(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["folder_to_runner"])
    with pytest.raises(SystemExit, match="usage: .*folder_to_runner FOLDER"):
        runpy.run_module("auxhead.model.examples.folder_to_runner", run_name="__main__")


def test_a_folder_of_images_becomes_a_runner(device, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write_image_folder(tmp_path / "stripes", per_class=60, size=32)
    torch.manual_seed(0)
    importlib.import_module("auxhead.model.examples.folder_to_runner").main(
        str(folder), device.type, pixels=32, epochs=3
    )
    said = capsys.readouterr().out
    heads = said.count("of the work")
    assert heads == 3 if device.type == "cpu" else 1 <= heads <= 3, "on a GPU times are measured, and may come close"
    assert re.search(r"right, .* if nobody left early$|samples", said, re.MULTILINE), said
    assert re.search(r"^\['(lying|standing)', .*\] \[\d(, \d){4}\]$", said, re.MULTILINE), said
    assert (tmp_path / "my-network" / "model.json").exists()


def test_a_network_is_run_from_graphs(printed, device):
    said = printed("run_from_graphs")
    if device.type == "cpu":
        assert "CUDA graphs need a GPU" in said and "\non cpu: label" in said
        return
    times = re.findall(r"^(overlapped|polled|gated|auto) +([\d,]+) +([\d,]+)$", said, re.MULTILINE)
    assert [name for name, *_ in times] == ["overlapped", "polled", "gated", "auto"]
    assert all(int(us.replace(",", "")) > 0 for _, *both in times for us in both)


@pytest.mark.parametrize(("name", "epochs"), [("classify_text", 1), ("two_streams", 2)])
def test_networks_of_several_inputs_go_all_the_way(printed, device, monkeypatch, name, epochs):
    example = importlib.import_module(f"auxhead.model.examples.{name}")
    if device.type == "cpu":  # seconds for what a GPU's test learns to the end
        monkeypatch.setattr(example, "EPOCHS", epochs)
        if name == "classify_text":
            monkeypatch.setattr(example, "EACH", 150)
    said = printed(name)
    ((count, right),) = re.findall(r"^test: (\d+) \w+, ([\d.]+)% right$", said, re.MULTILINE)
    left = [int(each) for each in re.findall(r"^ +(\d+) \w+ left at ", said, re.MULTILINE)]
    assert sum(left) == int(count) and len(left) == 4
    assert "come in as one" in said and said.count("Up to ") == (3 if name == "classify_text" else 0)
    assert device.type == "cpu" or float(right) > (60 if name == "classify_text" else 75)


def test_times_of_the_graphs_are_microseconds(monkeypatch):
    """An event's times are milliseconds; here a request takes a quarter of one, and every tenth takes three."""
    clock = {"ms": 0.0, "requests": 0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = clock["ms"]

        def elapsed_time(self, end):
            return end.ms - self.ms

    def runner(_images):
        clock["requests"] += 1
        clock["ms"] += 3.0 if clock["requests"] % 10 == 0 else 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    example = importlib.import_module("auxhead.model.examples.run_from_graphs")
    assert example.device_us(runner, torch.zeros(1)) == 250.0
