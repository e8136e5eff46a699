"""The command ``auxhead-tune sweep`` without a GPU: what it measures, shows and refuses."""

import importlib
import re
from contextlib import nullcontext

import pytest
import torch
from auxhead.autotune.measuring.failures import DeviceLost
from auxhead.autotune.measuring.heads_alone import ALONE, NETWORK
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.config_text import text
from auxhead.autotune.sweep.exclusion import excluded
from auxhead.autotune.sweep.winners import recorded_winners
from auxhead.kernels.launch.kernel_hash import kernel_hash
from auxhead.kernels.launch.tuned_table import read_table
from support.command_line import assert_one_line_error, assert_told_how_to_go_on, tune
from support.sweep_fakes import Synthetic, small_target

running = importlib.import_module("auxhead.autotune.sweep.run")


def sweep(*arguments):
    return tune("sweep", *arguments)


class Measurer(Synthetic):
    """Made-up times of a cell's two shapes of heads; remembers which cells were measured."""

    cells = []
    stopped_by = None
    protocol = {"chain": 20}
    of_network = {"trunk": "feedfacecafebeef", "forks": []}

    def __init__(self, subject, pool):
        super().__init__(fails=lambda config: config.stages == 2 and ("prepare", "wrong answer", "off by 2"))
        self.cell = subject
        Measurer.cells.append(subject)

    @property
    def targets(self):
        cell = self.cell
        sizes = ((64, 49, ("layer1", "layer2")), (32, 25, ("layer3",)))
        made = [small_target(cell.batch, *size, cell.classes, taps) for *size, taps in sizes]
        return [one._replace(shape=one.shape._replace(dtype=cell.dtype)) for one in made]

    def time(self, target, place, *arguments):
        if place == NETWORK and Measurer.stopped_by is not None:
            raise Measurer.stopped_by
        return super().time(target, place, *arguments)


@pytest.fixture
def pretended(pretended_gpu, monkeypatch):
    monkeypatch.setattr(running, "HeadTiming", Measurer)
    monkeypatch.setattr(running, "CompilePool", nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Measurer, "cells", [])
    monkeypatch.setattr(Measurer, "stopped_by", None)
    return pretended_gpu / "sweep-nvidia-h200-fake.jsonl"


def test_a_sweep_is_shown_kept_and_not_repeated(pretended):
    done = sweep("resnet18", "--batch", 8, "--batch", 1, "--classes", 10)
    assert done.exit_code == 0, done.output
    assert [(cell.batch, cell.dtype, cell.placement) for cell in Measurer.cells] == [
        (8, "float16", "stages"), (1, "float16", "stages"),
    ]  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].lstrip().startswith("0% resnet18 float16, batch 8, 10 classes, 4 heads (stages)")
    assert any("14 configurations alone, 4 rounds" in line for line in lines)
    in_situ = next(line for line in lines if "4 configurations in situ" in line)
    assert all(part in in_situ for part in (" left: ", "best so far n", "failed: ", " wrong answer"))
    assert "layer1, layer2" in done.stdout and "Not timed: " in done.stdout
    assert "win" in done.stdout or "tie" in done.stdout
    assert "Records: autotune-records/sweep-nvidia-h200-fake.jsonl" in done.stdout
    records = read_records(pretended)
    assert {record.protocol["kernel"] for record in records} == {kernel_hash()}
    assert {record.cell["samples"] for record in records} == {1, 8}
    assert all(one.protocol["config"]["num_warps"] >= 1 and one.environment["sm_count"] == 132 for one in records)
    assert_winners_were_exchanged(records)
    kept = pretended.read_bytes()
    again = sweep("resnet18", "--batch", 8, "--batch", 1, "--classes", 10)
    assert again.exit_code == 0 and pretended.read_bytes() == kept and "configurations alone" not in again.stdout
    assert tables(again) == tables(done)


def assert_winners_were_exchanged(records):
    large, small = (sorted(found, key=lambda one: one.target.shape.channels) for _, found in recorded_winners(records))
    measured = {(one.cell["samples"], one.cell["channels"], one.protocol["place"], one.variant) for one in records}
    exchanged = 0
    for here, there in [*zip(large, small, strict=True), *zip(small, large, strict=True)]:
        shape = here.target.shape
        for place, config in ((ALONE, there.alone), (NETWORK, there.network)):
            known = (shape.samples, shape.channels, place, text(config)) in measured
            assert known == (excluded(config, shape) is None), f"{text(config)} at {shape}"
            exchanged += known and config not in (here.rule, there.rule)
    assert exchanged


def tables(result):
    """What is printed at the end."""
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    return [line for line in lines if not re.match(r" *\d+% ", line)]


def test_a_lost_device_is_one_line_and_what_was_measured_is_there(pretended, monkeypatch):
    monkeypatch.setattr(Measurer, "stopped_by", DeviceLost("the CUDA context is lost (RuntimeError: illegal access)"))
    assert_one_line_error(sweep("resnet18"), "the CUDA context is lost (RuntimeError: illegal access)")
    assert {record.protocol["place"] for record in read_records(pretended)} == {"alone"}


def test_an_interrupt_is_one_line_and_what_was_measured_is_there(pretended, monkeypatch):
    monkeypatch.setattr(Measurer, "stopped_by", KeyboardInterrupt())
    assert_told_how_to_go_on(sweep("resnet18"))
    kept = pretended.read_bytes()
    monkeypatch.setattr(Measurer, "stopped_by", None)
    assert sweep("resnet18").exit_code == 0 and pretended.read_bytes().startswith(kept)


def test_what_was_found_is_what_is_promoted(pretended, tmp_path):
    done = sweep("resnet18", "--classes", 10)
    assert done.exit_code == 0, done.output
    (found,) = Measurer.cells
    promoted = tune("promote", pretended, "--out", tmp_path / "table.json")
    assert promoted.exit_code == 0, promoted.output
    table = read_table(tmp_path / "table.json")
    for _, outcomes in recorded_winners(read_records(pretended)):
        for outcome in outcomes:
            for place, config in ((ALONE, outcome.alone), (NETWORK, outcome.network)):
                assert table.find(outcome.target.shape, place).config == config, f"{place} of {found}"
