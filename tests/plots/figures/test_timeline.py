"""Figure and trace of a timeline: they show what the records hold."""

import gzip
import json
from dataclasses import replace

import pytest
from auxhead.autotune.measuring.cuda_calls import PACK_KERNEL
from auxhead.autotune.overlap.run import failed_record
from auxhead.autotune.records.record import BadRecord
from auxhead.plots.figures import timeline
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import NoRecords
from support.command_line import plot
from support.overlap_fakes import CELL, CONV, records
from support.pretended_gpu import ENVIRONMENT
from support.written_records import written

#: Launch, SM, begin and end: an SM with two programs at a time, and a launch each after.
PROGRAMS = [[0, 0, 10.0, 15.0], [0, 0, 10.5, 14.0], [0, 131, 10.5, 21.0], [1, 0, 35.0, 47.0], [2, 7, 50.5, 54.0]]


def with_programs(**changes):
    made = records(**changes)
    made[1].measured["programs"] = PROGRAMS
    made[1].measured["clocks_differ_us"] = 0.42
    return made


def test_findings_that_are_none():
    drawn = FIGURES["timeline"].numbers(records(last_heads=200.0, both=100.5))
    assert drawn["title"].splitlines() == [
        "5 of 8 heads beside the trunk: only 11 % of their time lies under its kernels;",
        "all heads together add 0.5 % to the network's time (99 %: -0.4 to 1.4 %)",
    ]
    made = records(forks=())
    for record in made:
        record.measured["coverage"] = None
    made[1].measured["programs"] = [[0, 5, 51.0, 54.0]]
    made[1].measured["kernels"] = [one for one in made[1].measured["kernels"] if one["role"] != "side"]
    figure, drawn = FIGURES["timeline"].draw(made)
    assert drawn["title"].startswith("Nothing runs beside the trunk, all 8 heads with the classifier at its end;")
    assert drawn["heads"] == [] and drawn["all_replays"] is None and figure.axes
    faster = FIGURES["timeline"].numbers(records(both=90.0))
    assert "all heads together add -10.0 % to the network's time (99 %: " in faster["title"]


def test_the_last_network_is_drawn_and_only_with_its_summary():
    other = records(slower=2.0)
    failed = failed_record("overlap", CELL, "no memory", ENVIRONMENT)
    drawn = FIGURES["timeline"].numbers([*records(), *other, failed])
    assert drawn["span_us"] == other[1].measured["span_us"]
    with pytest.raises(NoRecords, match="no timeline with the summary of its run"):
        FIGURES["timeline"].draw([records()[0], records()[1]])


def test_the_trace(tmp_path):
    path = written(tmp_path / "records.jsonl", *with_programs())
    done = plot("perfetto", path, "--out", tmp_path / "trace.json")
    assert done.exit_code == 0 and done.stdout == f"Saved {tmp_path / 'trace.json'}\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["records.jsonl", "trace.json"]
    assert plot("perfetto", path, "--out", tmp_path / "trace.json.gz").exit_code == 0
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()) == (tmp_path / "trace.json").read_bytes()
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    for event in events:
        assert {"ph", "name", "pid", "tid", "ts", "args"} <= event.keys() and event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0 and event["cat"]
    names = {
        (event["name"], event["tid"]): event["args"]["name"] for event in events if event["name"].endswith("_name")
    }
    assert names["process_name", 0] == (
        "resnet18, float16, 3x224x224, 8 heads (after blocks), batch 8, 10 classes; one replay under torch.profiler"
    )
    lanes = {tid: name for (kind, tid), name in names.items() if kind == "thread_name"}
    assert list(lanes.values()) == [
        "trunk (high priority)",
        "heads (low priority)",
        "SM 0: programs of heads",
        "SM 0: programs of heads",
        "SM 7: programs of heads",
        "SM 131: programs of heads",
    ]
    shown = [
        (lanes[event["tid"]].partition(" (")[0], event["name"], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X"
    ]
    assert shown == [
        ("trunk", "max_pool_kernel", 0.0, 8.0),
        ("trunk", CONV, 9.0, 20.0),
        ("heads", "heads of layer1.0, layer1.1", 10.0, 12.0),
        ("trunk", CONV, 30.0, 16.0),
        ("heads", "heads of layer2.0, layer2.1, layer3.0", 35.0, 13.0),
        ("trunk", "joining launch: late heads, classifier, answer", 50.0, 4.0),
        ("SM 0: programs of heads", "heads of layer1.0, layer1.1", 10.0, 5.0),
        ("SM 0: programs of heads", "heads of layer2.0, layer2.1, layer3.0", 35.0, 12.0),
        ("SM 0: programs of heads", "heads of layer1.0, layer1.1", 10.5, 3.5),
        ("SM 7: programs of heads", "joining launch: late heads, classifier, answer", 50.5, 3.5),
        ("SM 131: programs of heads", "heads of layer1.0, layer1.1", 10.5, 10.5),
    ]
    assert trace["otherData"]["gpu"] == "H200"


def test_launches_that_pack_features_belong_to_those_that_decide():
    made = with_programs()
    wanted, kernels = FIGURES["timeline"].numbers(made)["heads"], made[1].measured["kernels"]
    for place, begin, role in ((4, 33.0, "side"), (4, 31.0, "side"), (7, 49.0, "join")):
        kernels.insert(place, {**kernels[2], "name": PACK_KERNEL, "role": role, "start_us": begin, "duration_us": 1.0})
    drawn = FIGURES["timeline"].numbers(made)
    assert [(one["begin"], one["end"]) for one in drawn["heads"]] == [(10.0, 22.0), (31.0, 48.0)]
    assert [one["taps"] for one in drawn["heads"]] == [one["taps"] for one in wanted]
    assert drawn["joining"] == [[49.0, 50.0], [50.0, 54.0]]
    shown = [event["name"] for event in timeline.chrome_trace(made)["traceEvents"] if event["ph"] == "X"]
    assert shown[2:8] == [
        "heads of layer1.0, layer1.1",
        CONV,
        *2 * ["features of heads"],
        "heads of layer2.0, layer2.1, layer3.0",
        "features of heads",
    ]


def test_each_network_is_a_process_of_its_own():
    first = records()
    second = [replace(one, cell={**one.cell, "batch": 32}, run="other") for one in records()]
    events = timeline.chrome_trace([*first, *second])["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.partition("batch ")[2][:2] for name in names] == ["8,", "32"]
    assert {event["pid"] for event in events} == {1, 2}


def test_bad_input(tmp_path):
    missing = plot("perfetto", tmp_path / "no.jsonl")
    assert missing.exit_code == 2 and missing.stderr.startswith(f"Error: {tmp_path / 'no.jsonl'}: no such file, wants")
    assert missing.stderr.endswith("`auxhead-tune overlap MODEL` makes it\n")
    summary, _ = records()
    only = plot("timeline", "--records", written(tmp_path / "summary.jsonl", summary), "--out", tmp_path / "x")
    assert (
        only.exit_code == 2 and "no measurement of kind 'timeline'; `auxhead-tune overlap MODEL` makes" in only.stderr
    )
    elsewhere = [replace(one, environment={**ENVIRONMENT, "gpu": "B200"}) for one in records()]
    mixed = written(tmp_path / "mixed.jsonl", *records(), *elsewhere)
    assert "got records of several gpu (B200, H200), wants those of one" in plot("perfetto", mixed).stderr
    assert issubclass(NoRecords, BadRecord) and not list(tmp_path.glob("trace*"))
