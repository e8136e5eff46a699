"""The commands of ``auxhead-plot``: the files that they write, and what they refuse."""

import copy
import json
import os
import subprocess
import sys

import pytest
from auxhead.autotune.records.record import BadRecord
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.figures.reports import read
from auxhead.plots.records import COMMITTED
from auxhead.plots.style import frame, new_figure, save_figure
from support.command_line import assert_one_line_error, plot

BENCH = COMMITTED / "h200/bench.jsonl"
REPORT = {
    "format": "auxhead demo report 1",
    "data": "digits",
    "image_size": 16,
    "seed": 0,
    "images": {"train": 60, "validation": 20, "test": 20},
    "exits": [
        {"name": "layer1.0", "threshold": 1.0, "images": 0, "share": 0.0, "accuracy": None, "accuracy_on_all": 0.3},
        {"name": "layer1.1", "threshold": 0.5, "images": 15, "share": 0.75, "accuracy": 1.0, "accuracy_on_all": 0.9},
        {"name": "classifier", "threshold": None, "images": 5, "share": 0.25, "accuracy": 0.8, "accuracy_on_all": 0.95},
    ],
    "accuracy": 0.95,
    "full_accuracy": 0.95,
    "left_before_last_block": 0.75,
    "environment": {"device": "a CPU", "python": "3", "torch": "2", "torchvision": "0", "auxhead": "0"},
}


@pytest.fixture
def report():
    return copy.deepcopy(REPORT)


def test_what_stands_below_a_figure_fits():
    figure = new_figure(2.0)
    figure.subplots()
    frame(figure, {"title": "A finding", "stamp": f"Short.\n{'wherever it was measured, ' * 20}\nLast."})
    figure.canvas.draw()
    (stamp,) = [text for text in figure.texts if text.get_text().startswith("Short.")]
    assert stamp.get_window_extent().x1 <= figure.bbox.x1 and stamp.get_text().endswith("\nLast.")


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_every_exit_alike_still_draws(report, accuracy):
    for line in report["exits"]:
        line.update(accuracy=accuracy, accuracy_on_all=accuracy)
    FIGURES["exits"].draw(report)[0].draw_without_rendering()


def test_files_are_the_same_each_time_and_nothing_else_is_left(report, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report))
    result = plot("exits", "--records", tmp_path / "report.json", "--out", tmp_path / "a" / "exits.png")
    assert result.exit_code == 0, result.output
    save_figure(*FIGURES["exits"].draw(report), tmp_path / "b" / "exits")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["exits.json", "exits.png", "exits.svg"]
    for name in ("exits.json", "exits.png", "exits.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_report_that_lacks_a_field(report, tmp_path):
    for missing in set(REPORT) - {"format"}:
        (tmp_path / "report.json").write_text(json.dumps({k: it for k, it in report.items() if k != missing}))
        with pytest.raises(BadRecord, match=rf"report\.json: {missing}: got nothing, wants "):
            read([tmp_path / "report.json"], ["demo"], {})
    report["exits"] = [{"name": "a"}]
    (tmp_path / "report.json").write_text(json.dumps(report))
    refused = plot("exits", "--records", tmp_path / "report.json", "--out", tmp_path / "x")
    assert_one_line_error(refused, "report.json: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{", "is not JSON"), ("[1]", "JSON list"), ('{"format": "x"}', "format: got 'x'")],
    ids=["missing", "not-json", "list", "schema"],
)
def test_the_command_refuses_in_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "report.json").write_text(content)
    assert_one_line_error(plot("exits", "--records", tmp_path / "report.json", "--out", tmp_path / "figure"), message)


def test_a_figure_is_of_your_own_last_records_or_says_that_it_is_not(report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "Of cpu/demo-digits.json, which comes with auxhead: " in plot("exits").stdout
    for number, name in enumerate(("auxhead-demo", "auxhead-calibrated", "other", "elsewhere/deeper")):
        (tmp_path / name).mkdir(parents=True)
        content = json.dumps({**report, "seed": number}) if name != "auxhead-calibrated" else '{"format": "x"}'
        (tmp_path / name / "report.json").write_text(content)
        os.utime(tmp_path / name / "report.json", (1e9 + 1e6 * number,) * 2)
    said = plot("exits").stdout
    assert "Of other/report.json, yours, written on 2001-10-02: a CPU, Python 3, torch 2" in said
    assert ", seed 2;" in json.loads((tmp_path / "exits.json").read_text())["stamp"]
    os.utime(tmp_path / "auxhead-demo" / "report.json")
    assert "Of auxhead-demo/report.json, yours" in plot("exits").stdout
    assert "yours" not in plot("exits", "--records", tmp_path / "elsewhere" / "deeper" / "report.json").stdout


@pytest.mark.parametrize("out", [".", "/", ".."])
def test_a_folder_is_no_name_of_a_figure(report, out, tmp_path):
    (tmp_path / "report.json").write_text(json.dumps(report))
    refused = plot("exits", "--records", tmp_path / "report.json", "--out", out)
    assert_one_line_error(refused, f"--out: got {out}, wants the name of a figure, as")


def test_files_that_were_named_are_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    assert_one_line_error(plot("all", "--records", "absent.jsonl"), "--records: absent.jsonl: no such file")
    named = plot("latency", "--records", "bench.txt")
    assert_one_line_error(named, "bench.txt: wants a name that ends in .jsonl; `auxhead-tune bench` makes it")
    nothing = plot("all", "--records", "empty.jsonl")
    assert nothing.exit_code == 2 and "Left out: exits. empty.jsonl: wants a name that ends in .json" in nothing.stdout
    assert "Left out: latency. empty.jsonl: no measurement" in nothing.stdout
    assert nothing.stderr == "Error: --records: got none that a figure is drawn from\n"


@pytest.mark.parametrize("command", ["auxhead.plots", "auxhead.autotune"])
def test_output_that_nobody_reads_on_is_no_error(command, tmp_path):
    arguments = {
        "auxhead.plots": ["exits", "--out", str(tmp_path / "exits")],
        "auxhead.autotune": ["table", str(BENCH), "--markdown"],
    }[command]
    running = [sys.executable, "-m", command, *arguments]
    with subprocess.Popen(running, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
