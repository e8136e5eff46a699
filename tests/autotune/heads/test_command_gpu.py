"""Heads alone on a GPU: fused, plain and compiled, in chains that are checked and timed."""

from pathlib import Path

import pytest
import torch
from auxhead.autotune.heads.run import Head, HeadRecords
from auxhead.autotune.heads.tables import head_tables
from auxhead.autotune.measuring.cells import Cell
from auxhead.autotune.measuring.environment import clocks, environment
from auxhead.autotune.measuring.head_timing import HeadTiming, measure_copy_speed
from auxhead.autotune.measuring.subject import build_subject
from auxhead.autotune.records.comparison import Paired
from auxhead.autotune.records.record import read_records
from auxhead.kernels.launch.kernel_hash import kernel_hash
from support.example_models import needs_gpu

pytestmark = needs_gpu

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_heads_are_measured_against_their_peers(dtype, tmp_path: Path):
    taps = ("layer1.0", "layer4.0")
    timing = HeadTiming(build_subject(Cell("resnet18", dtype, 16, 100, "own", taps, (3, 64, 64)), DEVICE), "as_is")
    path = tmp_path / "heads.jsonl"
    protocol = {"kernel": kernel_hash(), **timing.protocol, "rounds": 20, "captures": 2}
    kept = HeadRecords(path, environment(DEVICE), protocol)
    speed = measure_copy_speed(DEVICE, 3)
    for target, alone in timing.heads.items():
        results = timing.against_peers(target, 20, 2, lambda _variant: None)
        assert all(isinstance(result, Paired) for result in results.values()), results
        head = Head(target, alone.chosen, alone.bytes_moved)
        kept.add(head, results, speed, clocks(DEVICE))
        assert HeadRecords(path, kept.environment, protocol).has(head)
    assert {record.error for record in read_records(path)} == {None}
    (table,) = head_tables(read_records(path))
    assert [row[2] for row in table.rows] == list(taps) and not table.remarks
    assert not [cell for row in table.rows for cell in row if cell in ("-", "failed")]
