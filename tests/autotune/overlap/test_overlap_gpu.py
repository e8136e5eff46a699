"""Overlap on a GPU: the command from end to end on a small network, with a real profiler."""

import sys
from pathlib import Path

import pytest
import torch
from auxhead.autotune.measuring.cells import Cell
from auxhead.autotune.measuring.environment import environment
from auxhead.autotune.measuring.subject import build_subject
from auxhead.autotune.measuring.timers import CAPTURES
from auxhead.autotune.overlap import footprints
from auxhead.autotune.overlap.measure import REPLAYS, measure_overlap
from auxhead.autotune.overlap.run import overlap_records
from auxhead.autotune.overlap.tables import footprint_tables, overlap_tables
from auxhead.autotune.records.comparison import typical
from auxhead.autotune.records.record import read_records
from auxhead.plots.figures import timeline
from auxhead.plots.figures.registry import FIGURES
from support.command_line import tune
from support.example_models import needs_gpu
from support.pretended_gpu import ENVIRONMENT
from support.written_records import written

pytestmark = needs_gpu

#: Footprints, one of each kind.
NAMES = ("by rule", "programs x8", "16 warps a program", "64 registers", "4 SMs", "same priority")

FACTORY = """
import torch
from auxhead.model import EarlyExitNetwork
from support.example_models import SmallNet, plain_heads

def small():
    torch.manual_seed(0)
    example = torch.randn(4, 3, 64, 64, device="cuda")
    return EarlyExitNetwork(SmallNet().cuda(), plain_heads(), 0.9, example_input=None).cuda().eval(), example
"""


def test_the_command_on_a_network_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "factory_of_overlap.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    result = tune("overlap", "factory_of_overlap:small", "--out", "records.jsonl")
    assert result.exit_code == 0, result.output
    assert "hiding efficiency" in result.stdout and "the profiler's inflation of both" in result.stdout
    records = read_records(tmp_path / "records.jsonl")
    assert [(one.kind, one.error) for one in records] == [("overlap", None), ("timeline", None)]
    drawn = FIGURES["timeline"].numbers(records)
    assert drawn["trunk"] and drawn["joining"] and len(drawn["heads"]) == len(records[0].protocol["forks"])
    assert timeline.chrome_trace(records)["traceEvents"]


@pytest.mark.parametrize("batch", [1, 16])
def test_a_small_network(batch, tmp_path: Path):
    taps = ("layer1.0", "layer2.0", "layer4.1")
    cell = Cell("resnet18", "float16", batch, 100, "own", taps, (3, 64, 64))
    measured = measure_overlap(build_subject(cell, torch.device("cuda", 0)), lambda what, share: None)
    assert measured.forks and {len(timings) for timings in measured.times.values()} == {CAPTURES}
    for replays in measured.replays.values():
        assert len(replays) == REPLAYS and len({len(replay) for replay in replays}) == 1
    for replay in measured.replays["both"]:
        assert [one.role for one in replay].count("side") == len(measured.forks)
        assert replay[-1].role == "join" and all(one.grid and one.block and one.registers for one in replay)
    assert {one.role for replay in measured.replays["trunk"] for one in replay} == {"trunk"}
    for replay, programs, clocks_differ_us in measured.recorded:
        heads = [one for one in replay if one.role != "trunk"]
        assert {one.launch for one in programs} == set(range(len(heads))) and clocks_differ_us < 10.0
        for one in programs:  # the profiler's kernel begins before its first program does
            kernel = heads[one.launch]
            assert kernel.start_us - 5.0 < one.start_us <= one.end_us < kernel.end_us + 5.0
    path = written(tmp_path / "records.jsonl", *overlap_records(cell, measured, ENVIRONMENT))
    summary, timeline = read_records(path)
    found = summary.measured
    assert found is not None and timeline.measured is not None and summary.device_us is not None
    assert 0.0 <= found["coverage"]["median"] <= 1.0 and found["kernels"], summary.notes
    assert found["hiding_efficiency"]["median"] <= 1.5 and 0.5 < found["inflation"]["both"] < 10.0
    assert 0.5 < summary.paired[0]["device_ratio"] < 3.0
    assert len(timeline.measured["kernels"]) == len(measured.recorded[0].replay)
    assert timeline.measured["programs"] and 0.5 < timeline.measured["recording_inflation"] < 2.0
    (table,) = overlap_tables([summary, timeline])
    assert table.rows and len(table.remarks) >= 2


def test_they_are_measured_on_a_gpu(monkeypatch, tmp_path):
    cell = Cell("resnet18", "float16", 8, 10, "own", ("layer1.0", "layer1.1", "layer4.0"), (3, 64, 64))
    chosen = footprints.footprints_of
    monkeypatch.setattr(
        footprints, "footprints_of", lambda shapes: [one for one in chosen(shapes) if one.name in NAMES]
    )
    device = torch.device("cuda", 0)
    found = footprints.measure_footprints(build_subject(cell, device), lambda what, share: None)
    assert not found.failed, "programs that did not record, or answers that are not right, fail"
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    assert len(found.residency) >= 5
    for of_replays in found.residency.values():
        for one in of_replays:
            assert 0.0 < one["warps_share"] <= one["sm_share"] <= 1.5 and 1 <= one["sms"] <= sms and one["us"] > 0.5
    assert found.programs["programs x8"] > found.programs["by rule"]
    assert 0.8 < typical(found.times["both", "by rule"]) / typical(found.bare) < 3.0
    records = read_records(
        written(tmp_path / "records.jsonl", *footprints.footprint_records(cell, found, environment(device)))
    )
    (table,) = footprint_tables(records)
    assert len(table.rows) == len(found.footprints)
    FIGURES["footprint"].draw(records)
