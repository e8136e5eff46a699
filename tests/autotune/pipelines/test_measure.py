"""The whole measurement in two processes on the CPU: a small network, every variant, records and tables."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from auxhead.autotune.measuring.cells import Cell
from auxhead.autotune.pipelines.pieces import PieceTimes, bound_images_s
from auxhead.autotune.pipelines.run import measure_in_processes
from auxhead.autotune.pipelines.tables import pipeline_tables
from auxhead.autotune.pipelines.variants import PipelineOptions, cases_of
from auxhead.autotune.records.record import read_records
from auxhead.model.basics.bad_input import BadInput
from support.command_line import tune

pytestmark = [
    pytest.mark.usefixtures("without_interpreter"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
]


def options(path, **changed):
    cell = Cell("resnet18", "float32", 8, 10, "stages", ("layer1", "layer2", "layer3", "layer4"), (3, 32, 32))
    given = {"batches": (8,), "split_sizes": (3,), "rounds": 1, "out": str(path), "device": "cpu", "captures": 2}
    return PipelineOptions(cell, **{**given, **changed})


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_options_are_handed_over_whole(tmp_path):
    one = options(tmp_path / "records.jsonl", batches=(8, 4), split_sizes=(3, 5))
    assert PipelineOptions.from_json(one.to_json()) == one
    assert one.splits_of(4) == (3,) and one.cell_of(4).batch == 4
    assert len(cases_of(one)) == 2 * 3 + 3 * (2 + 1)


def test_every_variant_is_measured(tmp_path, threads):
    path = tmp_path / "records.jsonl"
    measure_in_processes(options(path))
    records = read_records(path)
    assert [(one.variant, one.exits, one.error) for one in records] == [
        (case.name, "never", None) for case in cases_of(options(path))
    ]
    assert len({one.run for one in records}) == 1
    for one in records:
        assert one.correctness["samples"] == 16
        found = one.measured
        assert found["images_s"]["captures"] == pytest.approx([8e6 / us for us in one.host_us["captures"]], rel=1e-3)
        assert len(found["images_s"]["captures"]) == 2 and found["images_s"]["median"] > 0
        if found["split_size"] is None:
            continue
        pieces = found["pieces"]
        assert len(pieces["graph_ms"]) == 2 and len(pieces["link_ms"]) == 1
        assert min(*pieces["graph_ms"], *pieces["link_ms"]) > 0
        assert found["bound_images_s"] == pytest.approx(bound_images_s(8, 3, PieceTimes(**pieces)), rel=1e-3)
    (table,) = pipeline_tables(records)
    assert len(table.rows) == len(records) and not table.remarks
    assert table.rows[0][3] == "1.00" and table.rows[2][4] == "1.00"


def test_a_process_that_fails_is_told(tmp_path, threads, capfd):
    broken = json.loads(options(tmp_path / "records.jsonl").to_json())
    broken["cell"]["model"] = "no_such_network"
    broken["processes"] = 1  # each imports all, which takes seconds
    with pytest.raises(BadInput, match="a process of the pipeline ended with status 1"):
        measure_in_processes(PipelineOptions.from_json(json.dumps(broken)))
    assert "no_such_network" in capfd.readouterr().err and not Path(tmp_path / "records.jsonl").exists()


def test_refusals(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for given, message in (
        (["--devices", "2"], "torch sees 0 CUDA devices here, wants 2"),
        (["--devices", "3"], "--devices: got 3, wants 1 or 2"),
        (["--split-size", "5"], "--split-size: got 5, wants none but with --devices 2"),
        (["--devices", "2", "--batch", "20"], "--split-size: got 20, wants less than the batch, 20"),
        (["--devices", "2", "--model", "a:b"], "--model: got a:b, wants one of resnet18"),
        (["--devices", "2", "--model", "resnet18", "--model", "resnet50"], "--model: got 2 values, wants one"),
        (["--devices", "2", "--quick"], "--quick: is none of pipelines"),
        (["--devices", "2", "--exits", "never"], "--exits: is none of pipelines"),
    ):
        done = tune("bench", *given)
        assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
