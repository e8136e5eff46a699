"""The command ``auxhead-tune sweep`` without a GPU: what it measures, shows and refuses."""

import importlib
import re
from contextlib import nullcontext

import pytest
import torch
from auxhead.autotune.measuring.failures import DeviceLost
from auxhead.autotune.measuring.subject import subject_of
from auxhead.autotune.measuring.timers import FINAL_ROUNDS
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.config_text import text
from auxhead.autotune.sweep.exclusion import excluded
from auxhead.autotune.sweep.winners import recorded_winners
from auxhead.kernels.launch.kernel_hash import kernel_hash
from auxhead.kernels.launch.tuned_table import read_table
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from support.command_line import assert_one_line_error, assert_told_how_to_go_on, tune
from support.example_models import SmallNet, plain_heads
from support.sweep_fakes import Synthetic, small_target

running = importlib.import_module("auxhead.autotune.sweep.run")


def sweep(*arguments):
    return tune("sweep", *arguments)


class Measurer(Synthetic):
    """Made-up times of a cell's two shapes of heads; remembers which cells were measured."""

    cells = []
    stopped_by = None
    protocol = {"chain": 20, "place": "alone"}

    @classmethod
    def of_network(cls, subject, pool):
        made = cls(fails=lambda config: config.stages == 2 and ("prepare", "wrong answer", "off by 2"))
        made.cell = subject
        Measurer.cells.append(subject)
        return made

    @property
    def targets(self):
        cell = self.cell
        sizes = ((64, 49, ("layer1", "layer2")), (32, 25, ("layer3",)))
        made = [small_target(cell.batch, *size, cell.classes, taps) for *size, taps in sizes]
        return [one._replace(shape=one.shape._replace(dtype=cell.dtype)) for one in made]

    def time(self, target, configs, rounds, captures):
        if rounds == FINAL_ROUNDS and Measurer.stopped_by is not None:
            raise Measurer.stopped_by
        return super().time(target, configs, rounds, captures)


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
    assert any("layer1, layer2: 14 configurations, 4 rounds" in line for line in lines)
    last = next(line for line in lines if "7 configurations, 20 rounds" in line)
    assert all(part in last for part in (" left: ", "best so far n", "failed: ", " wrong answer"))
    assert "batch 8, 64x1x49, avg, 10 classes" in done.stdout and "Not timed: " in done.stdout
    assert "win" in done.stdout or "tie" in done.stdout
    assert "Records: autotune-records/sweep-nvidia-h200-fake.jsonl" in done.stdout
    records = read_records(pretended)
    assert {record.protocol["kernel"] for record in records} == {kernel_hash()}
    assert {record.cell["samples"] for record in records} == {1, 8}
    assert all(one.protocol["config"]["num_warps"] >= 1 and one.environment["sm_count"] == 132 for one in records)
    assert_winners_were_exchanged(records)
    kept = pretended.read_bytes()
    again = sweep("resnet18", "--batch", 8, "--batch", 1, "--classes", 10)
    assert again.exit_code == 0 and pretended.read_bytes() == kept and " configurations, " not in again.stdout
    assert tables(again) == tables(done)


def assert_winners_were_exchanged(records):
    ((_, found),) = recorded_winners(records)
    measured = {(one.cell["samples"], one.cell["channels"], one.variant) for one in records}
    exchanged = 0
    for small, large in (found[:2], found[2:]):
        assert small.shape[1:] == large.shape[1:]
        for here, there in ((small, large), (large, small)):
            known = (here.shape.samples, here.shape.channels, text(there.config)) in measured
            assert known == (excluded(there.config, here.shape) is None), f"{text(there.config)} at {here.shape}"
            exchanged += known and there.config not in (here.rule, there.rule)
    assert exchanged


def tables(result):
    """What is printed at the end."""
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    return [line for line in lines if not re.match(r" *\d+% ", line)]


def test_heads_of_several_layers_are_refused_before_anything_is_measured(pretended, monkeypatch):
    example = torch.randn(2, 3, 8, 8)
    heads = plain_heads() | {"block0": FusedAuxHead(SmallNet.widths[0], 5, hidden_features=6)}
    subject = subject_of("tests:small", EarlyExitNetwork(SmallNet(), heads, example_input=example).eval(), example)
    monkeypatch.setattr("auxhead.autotune.measuring.networks.find_subject", lambda model, option: lambda: subject)
    refused = sweep("tests:small")
    assert_one_line_error(refused, "the head of block0 in tests:small has layers before its last one")
    assert "FusedAuxHead(None, 6) in its place" in refused.stderr and not Measurer.cells


def test_a_lost_device_is_one_line_and_what_was_measured_is_there(pretended, monkeypatch):
    monkeypatch.setattr(Measurer, "stopped_by", DeviceLost("the CUDA context is lost (RuntimeError: illegal access)"))
    assert_one_line_error(sweep("resnet18"), "the CUDA context is lost (RuntimeError: illegal access)")
    assert {record.protocol["rounds"] for record in read_records(pretended)} == {4}


def test_an_interrupt_is_one_line_and_what_was_measured_is_there(pretended, monkeypatch):
    monkeypatch.setattr(Measurer, "stopped_by", KeyboardInterrupt())
    assert_told_how_to_go_on(sweep("resnet18"))
    kept = pretended.read_bytes()
    monkeypatch.setattr(Measurer, "stopped_by", None)
    assert sweep("resnet18").exit_code == 0 and pretended.read_bytes().startswith(kept)


def test_what_was_found_is_what_is_promoted(pretended, tmp_path):
    done = sweep("resnet18", "--classes", 10)
    assert done.exit_code == 0, done.output
    promoted = tune("promote", pretended, "--out", tmp_path / "table.json")
    assert promoted.exit_code == 0, promoted.output
    table = read_table(tmp_path / "table.json")
    ((_, found),) = recorded_winners(read_records(pretended))
    assert len(found) == 2 and all(table.find(one.shape).config == one.config for one in found)
