"""Figures of costs, of two GPUs, of calibrations and diagnoses: what they take of records, and refuse."""

import dataclasses
import json

import pytest
from auxhead.autotune.records.record import BadRecord, append_record
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.figures.reports import read
from auxhead.plots.records import COMMITTED, NoRecords
from support.command_line import plot
from support.committed_records import records as committed
from support.cost_records import head_records, profile_records
from support.pipeline_records import pipeline_records

PROFILE, ROOFLINE = FIGURES["profile"], FIGURES["roofline"]


def test_roofline_takes_the_last_run_in_which_the_fused_head_was_timed():
    older, newer = head_records(floor=9.0, run="old"), head_records(floor=3.0, run="new")
    failed = [
        dataclasses.replace(record, run="bad", device_us=None, error="RuntimeError: x") if record.variant != "bytes"
        else dataclasses.replace(record, run="bad")
        for record in newer[:4]
    ]  # fmt: skip
    assert ROOFLINE.numbers([*older, *newer, *failed])["heads"] == ROOFLINE.numbers(newer)["heads"]
    without = [record for record in newer if record.variant != "compiled"]
    assert all(set(head["us"]) == {"eager", "fused"} for head in ROOFLINE.numbers(without)["heads"])
    with pytest.raises(NoRecords, match="no fused head that was timed"):
        ROOFLINE.draw(failed)


def test_profile_numbers_and_title():
    drawn = PROFILE.numbers([*profile_records("r0", before_us=5000.0), *profile_records()])
    assert drawn["title"] == "97 launches of a request become 1, and the answer is there 8.7 times sooner"
    assert drawn["launches"] == {"before": 97.0, "after": 1.0} and drawn["kernels"] == {"before": 97.0, "after": 23.0}
    assert drawn["answer_us"]["before"]["median"] == 1872.0
    parts = drawn["api_us"]
    assert list(parts["before"])[:2] == ["cudaLaunchKernel", "cuLaunchKernelEx"] and len(parts["before"]) == 6
    assert parts["after"]["cudaGraphLaunch"] == 31.0 and parts["before"]["all others"] == pytest.approx(5 + 4 + 3)
    assert [sum(parts[side].values()) for side in ("before", "after")] == pytest.approx([607.0, 41.5])
    assert "2.0 times later" in PROFILE.numbers(profile_records(before_us=100.0, after_us=200.0))["title"]
    with pytest.raises(NoRecords, match="lacks what was before or what was after"):
        PROFILE.draw(profile_records()[:1])


def test_throughput_of_two_gpus_needs_the_baseline():
    records = [one for one in pipeline_records() if one.variant != "model-parallel"]
    with pytest.raises(NoRecords, match="no record of pipelined-heads beside model-parallel at batch 512"):
        FIGURES["pipeline"].draw(records)
    title = FIGURES["pipeline"].numbers(pipeline_records())["title"]
    assert title == (
        "Two GPUs as a pipeline: 0.90 times the images of one that has room for all,\n"
        "1.80 times those of two that take turns (batch 512)"
    )


# Calibrations.


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
    curve, tested = FIGURES["calibration"].draw(report)[0].axes[3:5]
    assert curve.get_xlabel() == tested.get_xlabel() == "ms to the answer, batch 8"
    lines = labelled(curve) | labelled(tested)
    assert lines["early exit, as chosen"][0] == [3.5] and lines["all stop at one exit"][0] == list(range(1, exits + 1))
    assert lines["candidates"][0] == [row["latency_ms"] for row in rows]


@pytest.fixture
def curve():
    return json.loads((COMMITTED / "cpu" / "anytime-digits.json").read_text())


def test_anytime_curves_are_over_work_and_where_it_was_measured_over_time(curve):
    figure, numbers = FIGURES["anytime"].draw(curve)
    (axes,), flops = figure.axes, curve["flops"]
    assert axes.get_xlabel() == "million FLOPs a sample, mean"
    drawn = labelled(axes)["thresholds by share (MSDNet)"]
    wanted = [[one["work"] * flops / 1e6, 100 * one["accuracy"]] for one in curve["alone"]["budgeted"]]
    assert drawn == [list(axis) for axis in zip(*wanted, strict=True)]
    assert "may have learned" not in numbers["stamp"]
    assert "may have learned from" in FIGURES["anytime"].numbers({**curve, "unknown": "its backbone"})["stamp"]
    assert numbers["title"].endswith(";\ncut off at layer2.1 it gets 99.1 %"), "as often, with no more work"
    worse = [{**one, "accuracy": 0.5} for one in curve["exits"]]
    assert "cut off" not in FIGURES["anytime"].numbers({**curve, "exits": worse})["title"]
    curve["flops"] = None
    curve["latencies"] = {"milliseconds": [1.0] * 9, "batch_size": 8, "runner": "r", "device": "d"}
    for number, row in enumerate([*curve["alone"]["path"], *curve["alone"]["budgeted"], *curve["exits"]]):
        row["latency_ms"] = number / 10
    work, time = FIGURES["anytime"].draw(curve)[0].axes
    assert work.get_xlabel() == "% of the backbone's operators" and time.get_xlabel() == "ms to the answer, batch 8"


def test_reports_of_other_commands_are_passed_over(report, tmp_path):
    demo, own = COMMITTED / "cpu" / "demo-digits.json", tmp_path / "report.json"
    own.write_text(json.dumps(report))
    assert read([demo, own], ["calibrate"], {}) == report
    with pytest.raises(NoRecords, match="got reports of other commands"):
        read([demo], ["calibrate"], {})
    own.write_text(json.dumps({**report, "chosen": "best"}))
    with pytest.raises(BadRecord, match="chosen: got 'best', wants"):
        read([own], ["calibrate"], {})


# Diagnoses.


@pytest.mark.parametrize(
    "target, said",
    [
        ("one_launch", "734 us a request, of which the GPU needs 642 at least"),
        ("graphs", "750 us a request, of which the GPU works 708"),
    ],
)
def test_the_title_says_what_the_gpu_needs_if_it_can_be_told(target, said):
    found = [one for one in committed("h200/doctor.jsonl") if one.cell["target"].endswith(f":{target}")]
    drawn = FIGURES["doctor"].numbers(found)
    assert drawn["title"].endswith(f":{target}:\n{said}")


def test_the_last_diagnosis_is_drawn_whatever_those_before_it_are_of(tmp_path):
    first, *_, last = committed("h200/doctor.jsonl")
    elsewhere = dataclasses.replace(first, environment={**first.environment, "gpu": "NVIDIA H100", "torch": None})
    for one in (elsewhere, last):
        append_record(tmp_path / "doctor.jsonl", one)
    drawn = plot("doctor", "--records", tmp_path / "doctor.jsonl", "--out", tmp_path / "figure")
    assert drawn.exit_code == 0, drawn.output
    assert json.loads((tmp_path / "figure.json").read_text()) == FIGURES["doctor"].numbers([last])
