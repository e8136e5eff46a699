"""Figure "calibration": what its panels show, and reports that it is not drawn from."""

import json

import pytest
from auxhead.autotune.records.record import BadRecord
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.figures.reports import read
from auxhead.plots.records import COMMITTED, NoRecords


@pytest.fixture
def report():
    return json.loads((COMMITTED / "cpu" / "calibration-digits.json").read_text())


def labelled(axes):
    return {line.get_label(): [list(line.get_xdata()), list(line.get_ydata())] for line in axes.lines}


def test_with_latencies_the_curve_is_over_time(report):
    exits, rows = len(report["exits"]), report["curve"]
    report["latencies"] = {"milliseconds": list(range(1, exits + 1)), "batch_size": 8, "runner": "r", "device": "d"}
    report["expected_latency_ms"] = 3.5
    for number, row in enumerate(rows):
        row["latency_ms"] = 9 - number / 100
    curve = FIGURES["calibration"].draw(report)[0].axes[3]
    assert curve.get_xlabel() == "ms to the answer, batch 8"
    lines = labelled(curve)
    assert lines["early exit, test"][0] == [3.5] and lines["all stop at one exit, test"][0] == list(range(1, exits + 1))
    assert lines["candidates, split for thresholds"][0] == [row["latency_ms"] for row in rows]


def test_reports_of_other_commands_are_passed_over(report, tmp_path):
    demo, own = COMMITTED / "cpu" / "demo-digits.json", tmp_path / "report.json"
    own.write_text(json.dumps(report))
    assert read([demo, own], ["calibrate"], {}) == report
    with pytest.raises(NoRecords, match="got reports of other commands"):
        read([demo], ["calibrate"], {})
    own.write_text(json.dumps({**report, "chosen": "best"}))
    with pytest.raises(BadRecord, match="chosen: got 'best', wants"):
        read([own], ["calibrate"], {})
