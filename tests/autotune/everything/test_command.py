"""The command ``auxhead-tune everything`` without a GPU: its steps, what it says and leaves, how it goes on."""

import dataclasses
import importlib

import pytest
import torch
from auxhead.autotune.measuring.heads_alone import Target
from auxhead.autotune.records.record import append_record, read_records
from auxhead.autotune.sweep.broad import BROAD
from auxhead.autotune.tuned.promote import promote
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.kernel_hash import kernel_hash
from auxhead.kernels.launch.tuned_table import read_table, table_path
from support.command_line import assert_told_how_to_go_on, tune
from support.example_tables import lookup
from support.head_fakes import a_random_head
from support.pretended_gpu import NAME
from support.sweep_fakes import Synthetic, in_two_steps, records_at, run
from torchvision import models

running = importlib.import_module("auxhead.autotune.everything.run")
CPU = torch.device("cpu")
HEAD = BROAD[-3][0].planned(CPU).shape


@pytest.fixture
def steps(pretended_gpu, tables, monkeypatch):
    """What was run so far; the sweeps measure a head each, with made-up times."""
    done = []

    def run_sweep(chosen, strategy, out):
        done.append((chosen and chosen.model, strategy))
        target = Target(HEAD if chosen is None else min(running.heads_of_resnet(chosen)))
        known = records_at(out, environment={"gpu": NAME}, protocol={"kernel": kernel_hash()})
        run(in_two_steps, known, Synthetic(), [target])

    def run_random_heads(count, seed, compiled_every, out):
        done.append((count, seed, lookup(NAME, HEAD) is not None))
        for one in a_random_head():
            append_record(out, dataclasses.replace(one, environment={"gpu": NAME}, protocol={"kernel": kernel_hash()}))

    monkeypatch.setattr(running, "run_sweep", run_sweep)
    monkeypatch.setattr(running, "run_random_heads", run_random_heads)
    return done


SWEEPS = [(None, "quick"), ("resnet18", "quick"), ("resnet50", "quick")]


def test_one_command_leaves_all_that_is_to_be_committed(steps, tables, tmp_path):
    assert lookup(NAME, HEAD) is None, "remembered: there is no table yet"
    done = tune("everything", "--out", "here")
    assert done.exit_code == 0, done.output
    assert steps == [*SWEEPS, (400, 50, True)], "random heads are launched by the new table"
    folder = tmp_path / "here" / "nvidia-h200-fake"
    assert (
        f"{NAME}: about 43 minutes;" in done.stdout and "Ctrl-C at any time: the same command goes on." in done.stdout
    )
    assert f"here/{folder.name} has what is to be committed:" in done.stdout
    assert {path.name for path in folder.iterdir()} == {
        "nvidia-h200-fake.json", "sweep.jsonl.gz", "random-heads.jsonl.gz"
    }  # fmt: skip
    for place in (f"autotune/records/{folder.name}/sweep.jsonl.gz", f"kernels/launch/tuned/{folder.name}.json"):
        assert f"  {place}, 0.0" in done.stdout
    assert (folder / "nvidia-h200-fake.json").read_bytes() == table_path(NAME).read_bytes()
    again = promote([folder / "sweep.jsonl.gz"], tmp_path / "again.json").table
    assert again.as_text() == read_table(table_path(NAME)).as_text(), "what is kept decides the same"
    whole, kept = (
        read_records(path) for path in (folder.parent / "sweep-nvidia-h200-fake.jsonl", folder / "sweep.jsonl.gz")
    )
    assert {one.variant for one in kept} <= {one.variant for one in whole} and kept


def test_what_is_recorded_is_no_more_work(steps):
    first, again = (tune("everything").stdout for _ in range(2))
    for what, heads, minutes in (("the broad set", 68, 17), ("resnet18", 32, 8), ("resnet50", 32, 8)):
        assert f"  Sweep of {what}: {heads} heads, about {minutes} minutes" in first
    assert f"{NAME}: about 43 minutes;" in first and f"{NAME}: about 42 minutes;" in again


def test_what_was_tuned_beside_another_rule_is_work_again(steps, monkeypatch):
    tune("everything")
    rule = running.chosen_by_rule
    monkeypatch.setattr(running, "chosen_by_rule", lambda shape: dataclasses.replace(rule(shape), num_warps=16))
    assert f"{NAME}: about 43 minutes;" in tune("everything").stdout


@pytest.mark.parametrize("chosen", running.NETWORKS, ids=lambda one: one.model)
def test_the_heads_of_resnets_are_known_without_running_them(chosen):
    cell, found = chosen.cells[0], []

    def keep(_layer, _inputs, y):
        y = y.to(memory_format=torch.channels_last)  # as it is on a GPU
        view = head_view(y.shape, y.stride(), "avg", (1, 1))
        found.append(HeadShape.of(view, cell.classes, pool_max=False, dtype=getattr(torch, cell.dtype)))

    with torch.device("meta"):
        backbone = getattr(models, cell.model)()
        x = torch.empty(cell.batch, *cell.input)
    for tap in cell.taps:
        backbone.get_submodule(tap).register_forward_hook(keep)
    backbone(x)
    shapes = running.heads_of_resnet(chosen)
    assert {*found} == {one for one in shapes if (one.samples, one.classes) == (cell.batch, cell.classes)}
    assert len(shapes) == sum(len(one.taps) for one in chosen.cells)


def test_a_random_head_that_fails_is_told_by_the_exit_code(steps, monkeypatch):
    usual = running.run_random_heads

    def fails(count, seed, compiled_every, out):
        usual(count, seed, compiled_every, out)
        for one in a_random_head(1, error="wrong answer: x"):
            append_record(out, one)

    monkeypatch.setattr(running, "run_random_heads", fails)
    done = tune("everything")
    assert done.exit_code == 1 and "has what is to be committed" in done.stdout


def test_an_interrupt_is_one_line(steps, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_random_heads", stopped)
    assert_told_how_to_go_on(tune("everything"))
    assert steps == SWEEPS
