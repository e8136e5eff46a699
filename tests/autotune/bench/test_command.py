"""The commands ``auxhead-tune bench`` and ``table`` without a GPU: what it measures, prints and refuses."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from auxhead.autotune.bench.measure import BenchOptions
from auxhead.autotune.bench.run import pattern_runs
from auxhead.autotune.bench.tables import COLUMNS, bench_tables
from auxhead.autotune.measuring.cells import core_matrix
from auxhead.autotune.records.record import read_records
from auxhead.autotune.records.tables import as_markdown
from support.bench_fakes import faked_plan, run, small_subject
from support.command_line import assert_one_line_error, assert_told_how_to_go_on, tune
from support.pretended_gpu import ENVIRONMENT, compute_on_the_cpu


@pytest.fixture
def subject(without_interpreter):
    return small_subject()


@pytest.fixture
def plan(tmp_path, monkeypatch):
    return faked_plan(tmp_path / "records.jsonl", monkeypatch)


def test_tables(subject, plan):
    records = run(subject, plan)
    (table,) = bench_tables(records)
    assert "tests:small float32, batch 4, 5 classes, 3 heads (own), 3x16x16; H200, torch 2.11" in table.title
    exits = [row[0] for row in table.rows]
    assert exits == sorted(exits, key=["never", "block1", "own"].index)
    row = next(row for row in table.rows if row[:2] == ("block1", "overlapped@as_is"))
    assert row == (
        "block1",
        "overlapped@as_is",
        "34.0 (33.0-35.0)",
        "16.0 (16.0-16.0)",
        "1.000",
        "1.000",
        "+2.0",
        "+1.0",
        "0.938",
    )
    failed = next(row for row in table.rows if row[1] == "graph-naive-forked@as_is")
    assert failed[2] == "failed" and len(failed) == len(COLUMNS) and "graph-naive-forked@as_is" in table.remarks[0]

    printed = tune("table", plan.out, "--markdown")
    assert printed.exit_code == 0 and printed.stdout.strip() == as_markdown(table).strip()
    assert "| block1 | overlapped@as_is | 34.0 (33.0-35.0) |" in printed.stdout
    drawn = tune("table", plan.out)
    assert drawn.exit_code == 0 and "overlapped@as_is" in drawn.stdout and "1.000" in drawn.stdout


def test_the_command(subject, plan, monkeypatch, tmp_path):
    running = importlib.import_module("auxhead.autotune.bench.run")
    monkeypatch.chdir(tmp_path)
    compute_on_the_cpu(monkeypatch, importlib.import_module("auxhead.autotune.measuring.networks"))
    monkeypatch.setattr("auxhead.autotune.measuring.networks.find_subject", lambda model, option: lambda: subject)
    arguments = (
        "bench",
        "--model",
        "tests:small",
        "--rounds",
        5,
        "--variant",
        "eager-[bn]*",
        "--variant",
        "graph-fused@as_is",
    )
    first = tune(*arguments)
    assert first.exit_code == 0, first.output
    assert "  0% tests:small float32" in first.stdout and " 80% about 0:" in first.stdout
    assert "Records: autotune-records/bench-nvidia-h200-fake.jsonl" in first.stdout
    records = read_records(tmp_path / "autotune-records" / "bench-nvidia-h200-fake.jsonl")
    assert {one.variant for one in records if one.exits == "never"} == {
        "eager-bare@as_is", "eager-naive@as_is", "eager-naive-item@as_is", "graph-bare@as_is", "graph-fused@as_is",
    }  # fmt: skip
    some = tune(*arguments, "--exits", "never", "--exits", "*2", "--out", "some.jsonl")
    assert some.exit_code == 0 and {one.exits for one in read_records(tmp_path / "some.jsonl")} == {"never", "block2"}
    second = tune(*arguments)
    assert second.exit_code == 0 and "% " not in second.stdout and "Records: " in second.stdout

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(running, "run_cell", no_memory)
    failed = tune(*arguments, "--fresh")
    assert (
        failed.exit_code == 2
        and "1 of 1 cells could not be measured" in failed.stderr
        and "out of memory" in failed.stderr
    )

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_cell", interrupted)
    assert_told_how_to_go_on(tune(*arguments, "--fresh"))


FACTORIES = """
import torch
from auxhead.model import EarlyExitNetwork
from support.example_models import SmallNet, plain_heads

def on_cpu(): return EarlyExitNetwork(SmallNet(), plain_heads()).eval(), torch.zeros(2, 3, 16, 16)
"""


def test_a_network_that_is_not_on_the_gpu_is_one_line(pretended_gpu, users_folder):
    (users_folder / "factories_of_tests.py").write_text(FACTORIES)
    assert_one_line_error(tune("bench", "--model", "factories_of_tests:on_cpu"), "returned tensors on cpu; wants")


def test_records_of_the_repository_can_be_read():
    for path in (Path(__file__).parents[3] / "autotune" / "records").rglob("*.jsonl"):
        records = read_records(path)
        assert records and all(json.dumps(record.cell) for record in records)
    assert pattern_runs(core_matrix()[0], BenchOptions(Path("x"), ENVIRONMENT, 50), [])
