"""``auxhead-tune doctor``: traces as targets, what it prints, keeps and draws, its status, and bad targets."""

import dataclasses
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

from auxhead.autotune.doctor.findings.kinds import KINDS
from auxhead.autotune.doctor.tables import doctor_tables
from auxhead.autotune.records.record import read_records
from auxhead.plots.records import COMMITTED
from support.command_line import assert_one_line_error, plot, tune
from support.committed_records import records
from support.damaged import damaged_json
from support.documents import Document
from support.example_traces import Program

TRACES = Path(__file__).parent / "traces"
FAULTY = str(TRACES / "question_returning_early.json.gz")
CORRECT = str(TRACES / "correct_graphed_resnet18.json.gz")


def test_a_trace_is_diagnosed_kept_and_drawn(tmp_path):
    out = tmp_path / "found"
    result = tune("doctor", "--out", str(out), FAULTY)
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert lines[0] == "2 requests, told by the doctor's annotation."
    assert lines[1].startswith("A request takes ") and lines[1].count(" us") == 3
    (wait,) = [index for index, line in enumerate(lines) if ". host-wait: " in line]
    assert "in forward, which begins at " in lines[wait] and lines[wait].endswith("us a request)")
    assert lines[wait + 1].startswith("   in forward, which begins at ") and lines[wait + 1].endswith("steps.py:57")
    assert any(line.startswith("   Remedy: ") for line in lines[wait:])
    assert lines[-1] == (
        f"Saved in {out}: doctor.jsonl (a record was appended; `auxhead-plot doctor --records {out}/doctor.jsonl` "
        "draws the last one)"
    )
    (record,) = read_records(out / "doctor.jsonl")
    kinds = [one["kind"] for one in record.measured["findings"]]
    assert kinds[0] == "launch-bound" and "host-wait" in kinds and len(lines) > 20
    assert f"{len(kinds)} findings." in lines
    assert record.environment["gpu"].startswith("NVIDIA H") and record.host_us["median"] > 0
    drawn = plot("doctor", "--records", str(out / "doctor.jsonl"), "--out", str(tmp_path / "figure"))
    assert drawn.exit_code == 0, drawn.output
    figure = json.loads((tmp_path / "figure.json").read_text())
    assert set(figure["lanes"]) == {"host", "default stream\npriority 0"}
    assert [one["said"].split()[1].rstrip(",:") for one in figure["findings"]] == kinds[:6]
    assert any(one["marks"] for one in figure["findings"])


def test_the_page_has_every_kind_and_what_to_change():
    page = Document("docs/doctor.md").text
    heading = "| finding | what it means | what to change |\n|---|---|---|\n"
    assert page.count(heading) == 1
    rows = page.partition(heading)[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [(kind, what) for kind, what, _ in cells] == [(f"`{kind}`", one.what) for kind, one in KINDS.items()]
    assert all(change for *_, change in cells)


def test_a_correct_program_has_no_finding(tmp_path):
    result = tune("doctor", "--out", str(tmp_path), CORRECT)
    assert result.exit_code == 0 and "No finding." in result.output.splitlines()


def test_json_is_all_that_is_printed(tmp_path):
    result = tune("doctor", FAULTY, "--out", str(tmp_path), "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["target"] == FAULTY and found["possible_us"] == max(found["trunk_us"], found["side_us"])
    fields = {"kind", "what", "evidence", "cost_us", "spread_us", "lines", "remedy", "snippet", "marks"}
    assert fields == set(found["findings"][0])


def test_a_trace_of_others_says_what_was_not_looked_for(tmp_path):
    content = json.loads(gzip.decompress(Path(FAULTY).read_bytes()))
    del content["auxheadDoctor"]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    result = tune("doctor", "--out", str(tmp_path / "out"), str(tmp_path / "trace.json"))
    assert result.exit_code == 1
    missing = "race, freed-in-use, unrecorded-event, mixed-devices, stream-class, priority, fusible-heads, jitter, "
    missing += "garbage-collection, code-loading, tf32-off"
    assert f"Not looked for, since a trace does not tell: {missing}." in result.output.splitlines()
    assert "with the profiler on" in result.output
    (record,) = read_records(tmp_path / "out" / "doctor.jsonl")
    assert record.host_us is None and record.environment["torch"] is None


def test_bad_targets_are_told_in_one_line_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words, message in (
        (["nosuch.json"], "TARGET: nosuch.json: no such file"),
        (["run"], "TARGET: got run and no script, wants run SCRIPT [ARGUMENTS]..."),
        (["run", "nosuch.py"], "SCRIPT: nosuch.py: no such file"),
        (["run", "nosuch.py", ""], "SCRIPT: nosuch.py: no such file"),  # what is empty is the script's
        (["tests:x", "y"], "TARGET: got tests:x and y, wants one target"),
        (["run", "--json"], "SCRIPT: --json: no such file"),  # what follows run is the script and its own
        (
            ["auxhead.model.guides.targets:in_line"],
            "torch sees no CUDA device here, wants one; a trace that was recorded elsewhere can be diagnosed here: "
            "auxhead-tune doctor TRACE.json.gz",
        ),
        (["train.py"], "a script is run by: auxhead-tune doctor run train.py; a trace's name ends in .json or .json"),
        (["in_line"], "TARGET: got 'in_line', wants package.module:factory; a script is run by"),
        (["run", "."], "SCRIPT: . is a directory, wants a file"),
        (["auxhead.model.guides.targets.py:in_line"], "; did you mean auxhead.model.guides.targets:in_line?"),
        (["auxhead.model.guides.targets:in_lin"], "; close to it: in_line"),
        (["nosuchmodule:f"], "TARGET: no module 'nosuchmodule'"),
    ):
        assert_one_line_error(tune("doctor", *words), message)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_trace_is_told_in_one_line(tmp_path):
    file = tmp_path / "broken.json"
    cut_off = (
        "cannot be read (Compressed file ended before the end-of-stream marker was reached); copy or record it again"
    )
    for content, message in ((b"[", "is not JSON"), (Path(FAULTY).read_bytes()[:5000], cut_off)):
        file.write_bytes(content)
        assert_one_line_error(tune("doctor", "--out", str(tmp_path / "out"), str(file)), message)
    assert list(tmp_path.iterdir()) == [file]


def test_a_trace_of_any_form_is_diagnosed_or_refused_in_one_line(tmp_path):
    program = Program()
    for _ in range(2):
        with program.request():
            program.kernel(30.0)
            program.kernel(10.0, stream=13)
    for seed in range(30):
        (tmp_path / "trace.json").write_bytes(damaged_json(program.content(), random.Random(seed)))
        result = tune("doctor", "--out", tmp_path / "out", tmp_path / "trace.json")
        if result.exit_code not in (0, 1) or result.exception and not isinstance(result.exception, SystemExit):
            assert_one_line_error(result, str(tmp_path / "trace.json"))
    assert read_records(tmp_path / "out" / "doctor.jsonl"), "what was kept can be read again"


def test_threads_of_a_script_that_was_ended_keep_nobody(tmp_path):
    """They wait for work that never comes."""
    (tmp_path / "serve.py").write_text("")
    code = """
import sys, threading
from auxhead.autotune.doctor import run
from auxhead.autotune.__main__ import app

def run_doctor(*_, **__):
    threading.Thread(target=threading.Event().wait).start()
    print("found something")
    return True

run.run_doctor = run_doctor
app(["doctor", "--out", sys.argv[1], "run", sys.argv[2]])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "out", tmp_path / "serve.py"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "found something\n"), done.stderr


# Tables of diagnoses.


def test_a_row_has_the_verdict_and_the_findings():
    [table] = doctor_tables(records("h200/doctor.jsonl"))
    assert table.title.startswith("Diagnoses on NVIDIA H200, torch ")
    rows = {row[0]: row[1:] for row in table.rows}
    assert len(rows) == 12 and all(len(row) == 5 for row in rows.values())
    for one in records("h200/doctor.jsonl"):
        findings, request, trunk, rest, both = rows[one.cell["target"]]
        assert findings == (", ".join(found["kind"] for found in one.measured["findings"]) or "none")
        assert (request, both) == tuple(f"{one.measured[name]:,.1f}" for name in ("achieved_us", "overlapped_us"))
        if one.measured["side_us"]:
            assert (trunk, rest) == tuple(f"{one.measured[name]:,.1f}" for name in ("trunk_us", "side_us"))
        else:
            assert (trunk, rest) == (f"{one.measured['trunk_us']:,.1f} together", "-")
    assert table.remarks == ["together: all that ran, of which nothing is told from the trunk"]


def test_diagnoses_of_one_target_are_all_there_and_other_devices_have_a_table_of_their_own():
    first, second, *_ = records("h200/doctor.jsonl")
    again = dataclasses.replace(first, run="later")
    elsewhere = dataclasses.replace(second, environment={**second.environment, "gpu": "NVIDIA H100"})
    tables = doctor_tables([first, elsewhere, again])
    assert [len(table.rows) for table in tables] == [2, 1] and "NVIDIA H100" in tables[1].title
    assert not tables[1].remarks


def test_the_table_command_prints_them():
    result = tune("table", str(COMMITTED / "h200/doctor.jsonl"))
    assert result.exit_code == 0, result.output
    assert "both at once" in result.output and "auxhead.model.guides.targets:one_launch" in result.output
    markdown = tune("table", "--markdown", str(COMMITTED / "h200/doctor.jsonl"))
    assert "| auxhead.model.guides.targets:one_launch | none | " in markdown.output
