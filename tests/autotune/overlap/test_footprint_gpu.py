"""Footprints on a GPU: every program is recorded, answers are right, and numbers are possible."""

import importlib

import pytest
import torch
from auxhead.autotune.measuring.cells import Cell
from auxhead.autotune.measuring.environment import environment
from auxhead.autotune.measuring.subject import build_subject
from auxhead.autotune.overlap.measure import BARE, BOTH
from auxhead.autotune.overlap.records import footprint_records
from auxhead.autotune.overlap.tables import footprint_tables
from auxhead.autotune.records.comparison import typical
from auxhead.autotune.records.record import read_records
from auxhead.plots.figures.registry import FIGURES
from support.example_models import needs_gpu
from support.written_records import written

pytestmark = needs_gpu

DEVICE = torch.device("cuda", 0)
timing = importlib.import_module("auxhead.autotune.overlap.footprints")
#: One of each kind.
NAMES = ("by rule", "programs x8", "16 warps a program", "64 registers", "4 SMs", "same priority")


@pytest.fixture(scope="module")
def measured():
    footprints_to_measure = timing.footprints_to_measure
    cell = Cell("resnet18", "float16", 8, 10, "own", ("layer1.0", "layer1.1", "layer4.0"), (3, 64, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            timing,
            "footprints_to_measure",
            lambda *heads: [one for one in footprints_to_measure(*heads) if one.name in NAMES],
        )
        return cell, timing.measure_footprints(build_subject(cell, DEVICE), lambda what, share: None)


def test_footprints_are_measured(measured, tmp_path):
    cell, found = measured
    assert not found.failed, "programs that did not record, or answers that are not right, fail"
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    by_name = {one.name: found.occupied[one] for one in found.footprints}
    assert len(by_name) >= 5
    for occupied in by_name.values():
        assert len(occupied.theoretical) == len(occupied.estimate) >= 1
        for one in occupied.theoretical:
            assert 16 <= one.registers <= 255 and one.programs_per_sm >= 1 and 0.0 < one.share <= 1.0
        for one in occupied.residency:
            assert 0.0 < one.warps_share <= one.sm_share <= 1.5 and 1 <= one.sms <= sms and one.us > 0.5
    assert max(one.sms for one in by_name["4 SMs"].residency) <= 4 * len(by_name["4 SMs"].theoretical)
    assert by_name["programs x8"].programs > by_name["by rule"].programs
    trunk, both = (
        typical(found.times[key]) for key in (timing.TimedPart(BARE), timing.TimedPart(BOTH, found.footprints[0]))
    )
    assert 0.8 < both / trunk < 3.0
    kept = footprint_records(cell, found, environment(DEVICE))
    records = read_records(written(tmp_path / "records.jsonl", *kept))
    (table,) = footprint_tables(records)
    assert len(table.rows) == len(found.footprints)
    FIGURES["footprint"].draw(records)
