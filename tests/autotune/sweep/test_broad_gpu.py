"""The broad set on a GPU: the heads of one family swept alone, and their table."""

import importlib

import pytest
import torch
from auxhead.autotune.records.record import read_records
from auxhead.autotune.sweep.broad import BROAD
from auxhead.kernels.launch.tuned_table import read_table, table_path
from support.command_line import tune
from support.example_models import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("options", [["--tables"], []], ids=["tables", "search"])
def test_a_family_is_swept_and_promoted(options, tables, tmp_path, monkeypatch):
    smallest = min(BROAD, key=lambda family: sum(sum(head.bytes) for head in family))
    monkeypatch.setattr(importlib.import_module("auxhead.autotune.sweep.run"), "BROAD", [smallest])
    out = tmp_path / "sweep.jsonl"
    done = tune("sweep", "broad", "--out", out, *options)
    assert done.exit_code == 0 and "Heads, each alone; " in done.stdout, done.output
    records = read_records(out)
    assert {one.cell["samples"] for one in records if one.error is None} == {head.input[0] for head in smallest}
    if not options:
        assert tune("promote", out).exit_code == 0
        table = read_table(table_path(torch.cuda.get_device_name()))
        assert len(table.entries) == len(smallest) and table.capability is not None
