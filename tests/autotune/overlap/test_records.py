"""Records and tables of overlap, and the command, without a GPU."""

import json

import pytest
from auxhead.autotune.overlap.run import failed_record, overlap_records
from auxhead.autotune.overlap.tables import overlap_tables
from auxhead.autotune.records.record import read_records
from support.command_line import tune
from support.overlap_fakes import CELL, CONV, measured, records
from support.pretended_gpu import ENVIRONMENT
from support.written_records import written


def test_the_summary(tmp_path):
    made = records(slower=1.0)
    assert read_records(written(tmp_path / "records.jsonl", *made)) == made, "what is written is what was measured"
    summary, timeline = made
    assert (summary.kind, timeline.kind) == ("overlap", "timeline") and summary.run == timeline.run
    assert summary.cell == CELL.as_json() and summary.variant == "overlapped@cudnn"
    assert summary.device_us == {
        "median": 104.5, "p20": 104.25, "p80": 104.75, "captures": [104.0, 104.25, 104.5, 104.75, 105.0],
    }  # fmt: skip
    trunk, heads = summary.paired
    assert trunk["role"] == "trunk" and trunk["device_us"]["captures"][::4] == [100.0, 101.0]
    assert heads["role"] == "heads" and heads["device_us"]["median"] == 20.5
    assert trunk["low"] < trunk["device_ratio"] < trunk["high"] and 1.039 < trunk["device_ratio"] < 1.041
    found = summary.measured
    # 12 under the convolution, and 11 to 13 of 13
    assert found["coverage"] == {"median": 0.96, "p20": round(23 / 25, 4), "p80": 1.0}
    assert found["exposed_us"] == {"median": 1.0, "p20": 0.0, "p80": 2.0}
    assert found["join_stall_us"]["median"] == 8.0 and found["join_us"]["median"] == 4.0
    assert found["span_us"] == {"median": 55.0, "p20": 54.0, "p80": 56.0} and found["bare_span_us"]["median"] == 48.0
    # (100 + 20 - 104) / 20 and so on, over five captures of each
    assert found["hiding_efficiency"]["median"] == pytest.approx(16.5 / 20.5, abs=0.02)
    assert found["inflation"] == {"trunk": 1.1, "both": 1.25}
    assert found["kernels"][1] == {"name": CONV, "bare_us": 18.0, "both_us": 20.0} and len(found["kernels"]) == 3
    assert timeline.measured["replay"] == 2 and timeline.measured["coverage"] == 0.96
    assert timeline.measured["span_us"] == 55.0 and timeline.device_us is None
    assert [one["role"] for one in timeline.measured["kernels"]] == ["trunk", "trunk", "side", "trunk", "side", "join"]
    assert timeline.measured["kernels"][1] == {
        "name": CONV, "role": "trunk", "stream": 7, "start_us": 9.0, "duration_us": 20.0,
        "grid": [12, 1, 1], "block": [128, 1, 1], "registers": 40,
    }  # fmt: skip
    assert timeline.measured["programs"] == [
        [0, 0, 10.0, 22.0], [0, 131, 10.5, 22.0], [1, 0, 35.0, 48.0], [1, 131, 35.5, 48.0],
        [2, 0, 51.0, 55.0], [2, 131, 51.5, 55.0],
    ]  # fmt: skip
    assert timeline.measured["clocks_differ_us"] == 0.0 and timeline.measured["recording_inflation"] == 1.0


def test_kernels_that_cannot_be_compared():
    other = measured()
    other.replays["trunk"][0] = other.replays["both"][0][1:]
    summary, _ = overlap_records(CELL, other, ENVIRONMENT)
    assert summary.measured["kernels"] == []
    assert summary.notes[-1].startswith("No stretch by kernel: bare: got 3 replays of different kernels")


def test_the_table():
    (table,) = overlap_tables(records(slower=1.0))
    assert table.title.startswith("Overlap: resnet18 float16, batch 8, 10 classes, 8 heads (blocks), 3x224x224; H200")
    cells = {row[1]: row[2:] for row in table.rows}
    assert cells["the trunk alone"] == ("us", "100.50", "100.25-100.75")
    assert cells["coverage: of that under kernels of the trunk"] == ("%", "96.0", "92.0 to 100.0")
    assert cells["the profiler's inflation of both"] == ("times", "1.250", "")
    assert cells["exposed: of that under none"] == ("us", "1.00", "0.00-2.00")
    launches, verdict, *stretched = table.remarks
    assert launches == (
        "5 of 8 heads run beside the trunk, in 2 launches after layer1.1, layer3.0; the other 3 with the classifier "
        "at its end."
    )
    assert verdict.startswith("Heads that take 20.50 us alone add +4.00 us to the trunk")
    assert verdict.endswith("% of what the heads take alone is hidden.")
    assert stretched == [
        f"Stretched by heads: +2.00 us (1.11 times) under the profiler, kernel 2 of the trunk's 3: {CONV}",
        f"Stretched by heads: +1.00 us (1.06 times) under the profiler, kernel 3 of the trunk's 3: {CONV}",
    ]


def test_tables_of_what_went_wrong_or_did_not_overlap():
    failed = failed_record("overlap", CELL, "RuntimeError: no memory", ENVIRONMENT)
    (table,) = overlap_tables([failed])
    assert not table.rows and table.remarks == ["Not measured: RuntimeError: no memory"]
    (table,) = overlap_tables([*records(), failed])
    assert table.rows, "a failure does not take the place of a measurement"
    summary, _ = records(forks=())
    summary.measured["coverage"] = None
    (table,) = overlap_tables([summary])
    assert (
        table.remarks[0] == "None of the 8 heads runs beside the trunk: all of them run with the classifier at its end."
    )
    assert ("%", "-", "-") in [row[2:] for row in table.rows]
    (table,) = overlap_tables(records(both=100.5))
    assert "add +0.50 us to the trunk, which captures differ by as well" in table.remarks[1]


@pytest.fixture
def pretended(pretended_gpu, monkeypatch):
    def measure_overlap(cell, begins):
        begins("timing", 0.8)
        if cell.batch == 32:
            raise RuntimeError("CUDA out of\nmemory")
        return measured()

    monkeypatch.setattr("auxhead.autotune.overlap.run.measure_overlap", measure_overlap)
    return pretended_gpu / "overlap-nvidia-h200-fake.jsonl"


ARGUMENTS = ("overlap", "resnet18", "--batch", 1, "--batch", 8, "--classes", 10, "--placement", "blocks")


def test_the_command(pretended):
    done = tune(*ARGUMENTS)
    assert done.exit_code == 0, done.output
    assert (
        " 40% about " in done.stdout and "batch 8, 10 classes, 8 heads (blocks), input 3x224x224: timing" in done.stdout
    )
    assert done.stdout.count("Overlap: resnet18 float16, batch ") == 2 and "join stall: from the trunk's" in done.stdout
    assert "Records: autotune-records/overlap-nvidia-h200-fake.jsonl" in done.stdout
    kept = read_records(pretended)
    assert [(one.kind, one.cell["batch"]) for one in kept] == [
        (kind, batch) for batch in (1, 8) for kind in ("overlap", "timeline")
    ]
    assert all(one.environment["clocks"] == {"sm_mhz": 1980.0} for one in kept)
    again = tune("table", pretended)
    assert again.exit_code == 0 and again.stdout.count("Overlap: resnet18") == 2


def test_a_network_that_fails_is_recorded_and_the_others_are_measured(pretended):
    done = tune("overlap", "resnet18", "--batch", 32, "--batch", 8, "--placement", "blocks")
    assert done.exit_code == 2 and "Not measured: RuntimeError: CUDA out of memory" in done.stdout
    assert done.stderr == (
        "Error: 1 of 2 networks could not be measured, the first: RuntimeError: CUDA out of memory\n"
    )
    assert [(one.kind, one.error) for one in read_records(pretended)] == [
        ("overlap", "RuntimeError: CUDA out of memory"), ("overlap", None), ("timeline", None)
    ]  # fmt: skip
    assert json.loads(pretended.read_text().splitlines()[0])["error"]
