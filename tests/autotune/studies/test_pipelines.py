"""The study of pipelines in two processes on the CPU: a small network, every variant, records and tables."""

import pytest
import torch.distributed as dist
from auxhead.autotune.bench.tables import pipeline_tables
from auxhead.autotune.records.record import read_records
from support.launched_ranks import launch
from support.replica_cases import serve

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
OPTIONS = ("--model", "resnet18", "--dtype", "float32", "--classes", 10, "--batch", 4, "--split-size", 3)
OPTIONS += ("--pixels", 32, "--rounds", 2, "--captures", 2, "--device", "cpu", "--out", "records.jsonl")


def test_every_variant_is_measured(tmp_path):
    serve()
    ended = launch([tmp_path] * 2, OPTIONS, main="auxhead.autotune.studies.pipelines:app", limit_s=120.0)
    assert [one.status for one in ended] == [0, 0], ended
    records = read_records(tmp_path / "records.jsonl")
    names = ["one-gpu", "one-gpu-cudnn", "model-parallel", "tutorial@3", "pipelined-one-head@3", "pipelined-heads@3"]
    assert [(one.variant, one.exits, one.error) for one in records] == [(name, "never", None) for name in names]
    assert len({one.run for one in records}) == 1
    for one in records:
        assert one.correctness["samples"] == 16 and one.correctness["differing"] == one.correctness["differing_near"]
        images_s = one.measured["images_s"]
        assert images_s["captures"] == pytest.approx([4e6 / us for us in one.host_us["captures"]], rel=1e-3)
    (table,) = pipeline_tables(records)
    assert len(table.rows) == len(records) and not table.remarks
    assert table.rows[0][2] == "1.00" and table.rows[2][3] == "1.00"
