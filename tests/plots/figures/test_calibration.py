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


def test_panels_show_the_numbers_of_the_report(report):
    figure, drawn = FIGURES["calibration"].draw(report)
    _before, after, shares, curve = figure.axes
    heights = [bar.get_height() for bar in shares.patches]
    assert heights == pytest.approx([100 * one["share"] for one in report["exits"]])
    lines = labelled(curve)
    x, y = lines["candidates, split for thresholds"]
    assert x == [one["mean_exit"] for one in report["curve"]]
    assert y == [100 * one["accuracy"] for one in report["curve"]]
    assert lines["the chosen one there"] == [[x[report["chosen"]]], [y[report["chosen"]]]]
    assert lines["early exit, test"] == [[report["mean_exit"]], [100 * report["accuracy"]]]
    assert lines["all stop at one exit, test"][1] == [100 * one["accuracy_on_all"] for one in report["exits"]]
    points = [tuple(point) for dots in after.collections for point in dots.get_offsets()]
    wanted = [
        (100 * sure, 100 * right)
        for one in report["exits"]
        for sure, right in zip(one["after"]["confidence"], one["after"]["accuracy"], strict=True)
        if sure is not None
    ]
    assert points == [pytest.approx(one) for one in wanted]
    assert f"{100 * report['bound']['max_accuracy_drop']:.2f} points at most" in drawn["title"]


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
