"""The broad set of heads: what is in it, and the command that tunes it, without a GPU."""

import importlib
from contextlib import nullcontext

import pytest
import torch
from auxhead.autotune.measuring.heads_alone import Target
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.broad import BROAD, family_name, made
from auxhead.autotune.sweep.search import quick
from auxhead.autotune.sweep.winners import kind_of
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.kernels.launch.tuned_table import read_table, table_path
from support.command_line import tune
from support.example_tables import entry, other, table, write
from support.sweep_fakes import Synthetic, true_us

running = importlib.import_module("auxhead.autotune.sweep.run")
CPU = torch.device("cpu")
SHAPES = [[head.planned(CPU).shape for head in family] for family in BROAD]


def test_heads_of_every_kind():
    every = [shape for shapes in SHAPES for shape in shapes]
    assert len(set(every)) == len(every) and 55 <= len(every) <= 75
    kinds = {kind_of(shape).partition(";")[0] for shape in every}
    assert kinds == {"vectors", "channels_last maps, flattened", "maxima", "means of windows", "means of all"}
    assert {shape.samples for shape in every} == {1, 8, 32, 128} and {10, 100, 1000, 21843} == {
        one.classes for one in every
    }
    assert {shape.dtype for shape in every} == {"float16", "bfloat16", "float32"}
    for shapes in SHAPES:
        assert len({shape[1:] for shape in shapes}) == 1, "a family differs in the batch size alone"
    assert len(set(map(family_name, BROAD))) == len(BROAD)


def test_a_family_is_made(without_interpreter):
    (family,) = [one for one in BROAD if family_name(one).startswith("512 ")]
    targets = made(family, CPU)
    assert [target.shape.samples for target in targets] == [1, 8, 32, 128] and not any(one.taps for one in targets)
    for head in targets.values():
        with torch.no_grad():
            assert head.wrong_answer(head.head(head.x)) is None


class Timing(Synthetic):
    """Made-up times of the heads of a family."""

    protocol = {"chain": 20, "place": "alone"}

    def __init__(self, device, heads, pool):
        super().__init__()
        self.targets = list(heads)


@pytest.fixture
def pretended(pretended_gpu, tables, monkeypatch):
    monkeypatch.setattr(running, "HeadTiming", Timing)
    monkeypatch.setattr(running, "CompilePool", nullcontext)
    monkeypatch.setattr(running, "BROAD", [BROAD[-3]])
    monkeypatch.setattr(running, "made", lambda family, device: {Target(one.planned(CPU).shape): one for one in family})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return pretended_gpu / "sweep-nvidia-h200-fake.jsonl"


def test_they_are_swept_alone_promoted_and_not_swept_again(pretended, tables):
    done = tune("sweep", "broad")
    assert done.exit_code == 0, done.output
    assert "512 float16; 10 classes: building" in done.stdout and "Heads, each alone; H200" in done.stdout
    assert "batch 8, 512x1x1, avg, 10 classes, float16" in done.stdout
    records = read_records(pretended)
    assert {record.protocol["place"] for record in records} == {"alone"}
    assert {record.cell["samples"] for record in records} == {1, 8, 32, 128}
    kept = pretended.read_bytes()
    again = tune("sweep", "broad")
    assert again.exit_code == 0 and pretended.read_bytes() == kept
    assert tune("promote", pretended).exit_code == 0
    assert len(read_table(table_path("H200")).entries) == 4


def test_what_tables_have_for_them_is_measured_in_seconds(pretended, tables):
    shapes = [one.planned(CPU).shape for one in BROAD[-3]]
    write(tables, table(*(entry(shape, config=other(shape)) for shape in shapes[:3])))
    done = tune("sweep", "broad", "--tables")
    assert done.exit_code == 0, done.output
    assert len(read_records(pretended)) == 4 + 3, "the rule's of each, and what the table has"
    said = tune("table", pretended, "--markdown").output
    assert "On H200: the rule's time over that of the entries of the table of ACME X-1 80GB" in said
    (row,) = [line.split(" | ") for line in said.splitlines() if line.startswith("| vectors; up to 128")]
    times = [[true_us(Target(one), config(one)) for config in (config_by_rule, other)] for one in shapes[:3]]
    assert row[1] == "3" and float(row[2]) == pytest.approx(sorted(rule / its for rule, its in times)[1], abs=0.02)


def test_a_search_begins_with_what_tables_have(tables):
    shape = SHAPES[-3][0]
    write(tables, table(entry(shape, config=other(shape))))
    assert next(quick(Target(shape))).configs[:2] == (config_by_rule(shape), other(shape))
    assert next(quick(Target(shape))).configs[2].by_library
