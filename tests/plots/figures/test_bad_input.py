"""Figures from made-up sweeps and benchmarks: their titles, and records that they refuse."""

import dataclasses
import json

import pytest
from auxhead.autotune.records.record import BadRecord, Record
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import NoRecords
from support.command_line import plot
from support.pretended_gpu import ENVIRONMENT
from support.written_records import written

SHAPE = {
    "samples": 8, "channels": 64, "height": 1, "width": 49, "grid_h": 1, "grid_w": 1, "layout": "channels_last",
    "pool": "avg", "classes": 10, "dtype": "float16",
}  # fmt: skip
CELL = {"model": "m", "dtype": "float16", "classes": 10, "placement": "stages", "taps": ["early"], "input": [3, 8, 8]}


def record(kind, cell, variant, us, protocol, exits="never", **changed):
    utc = "2026-01-01T00:00:00+00:00"
    return Record(kind, cell, variant, "r", ENVIRONMENT, protocol, us, us, exits=exits, utc=utc, **changed)


def swept(variant, us, warps=4, kernel="k", place="alone"):
    """Timed in five captures, two percent apart, of four rounds, beside a rule that takes 10 us."""
    capture = [0.99, 0.995, 1.0, 1.005, 1.01]
    samples, baseline = ([[factor * mean] * 4 for factor in capture] for mean in (us, 10.0))
    config = {"num_warps": warps, "block_c": 16}
    protocol = {"place": place, "kernel": kernel, "config": config, "rounds": 4, "captures": 5}
    pair = {"role": "rule", "variant": "rule", "samples": baseline}
    times = {"median": us, "p20": us, "p80": us, "samples": samples}
    return record("sweep", SHAPE, variant, times, protocol, paired=[pair])


def sweep():
    """The records of three configurations, of which a is the fastest."""
    return [swept("a", 8.0, 2), swept("rule", 10.0, 4), swept("b", 12.0, 8)]


def test_only_the_kernel_that_was_swept_last_counts_and_no_network():
    old, in_network = swept("old", 1.0, kernel="before"), swept("beside a trunk", 1.0, place="network")
    (head,) = FIGURES["landscape"].numbers([old, *sweep(), in_network])["heads"]
    assert [one["config"] for one in head["configs"]] == ["a", "rule", "b"]


def test_the_landscape_has_what_was_tried_and_what_ties():
    drawn = FIGURES["landscape"].numbers([*sweep(), swept("c", 8.02, warps=16)])
    configs = drawn["heads"][0]["configs"]
    assert [(one["config"], one["num_warps"], one["within_noise"]) for one in configs] == [
        ("a", 2, True), ("c", 16, True), ("rule", 4, False), ("b", 8, False),
    ]  # fmt: skip
    assert configs[-1]["over_fastest"] == pytest.approx(1.5) and "in 0 of 1 heads" in drawn["title"]
    assert drawn["kind"] == "float16, 10 classes" and drawn["heads"][0]["head"] == "64x49, batch 8"
    with pytest.raises(NoRecords, match="no head of which two configurations were measured"):
        FIGURES["landscape"].numbers(sweep()[:1])


def benched(variant, batch, us, exits="never", bare=None):
    times = {"median": us, "p20": us - 1, "p80": us + 1, "captures": [us], "p99": us + 2}
    ratios = {"host_us": bare, "host_ratio": us / bare, "device_us": bare, "device_ratio": us / bare} if bare else {}
    paired = [{"role": "bare", "variant": "graph-bare@cudnn", **ratios}] if bare else []
    protocol = {"rounds": 50, "captures": 5}
    return record("bench", {**CELL, "batch": batch}, variant, times, protocol, exits, paired=paired)


def latencies():
    """The records of two batch sizes, without heads and with."""
    records = [benched("graph-bare@cudnn", batch, 100.0) for batch in (1, 8)]
    return records + [benched("overlapped@cudnn", batch, us, bare=100.0) for batch, us in ((1, 103.0), (8, 107.0))]


def test_latency_says_what_heads_add():
    records = latencies()
    drawn = FIGURES["latency"].numbers([*records, benched("overlapped@cudnn", 1, 50.0, "early", bare=100.0)])
    assert "1 overlapped heads of 10 classes add 3 to 7 % of device time" in drawn["title"]
    assert [point["batch"] for point in drawn["classes"]["10"]["overlapped@cudnn"]] == [1, 8]
    with pytest.raises(NoRecords, match="two batch sizes"):
        FIGURES["latency"].draw([one for one in records if one.cell["batch"] == 1])


def test_time_to_answer_is_compared_with_the_floor_and_the_whole():
    records = [benched("graph-bare@cudnn", 8, 200.0, exits) for exits in ("early", "never")]
    records += [benched("truncated@cudnn", 8, 60.0, "early"), benched("gated@cudnn", 8, 80.0, "early")]
    drawn = FIGURES["time-to-answer"].numbers(records)
    assert "at early, gated answers in 40 to 40 %" in drawn["title"] and "20 to 20 us after" in drawn["title"]
    with pytest.raises(NoRecords, match="samples that leave at a tap"):
        FIGURES["time-to-answer"].draw([one for one in records if one.exits == "never"])


def test_a_record_of_a_sweep_that_lacks_something():
    broken = sweep()[0]
    with pytest.raises(BadRecord, match="config"):
        FIGURES["landscape"].numbers([dataclasses.replace(broken, protocol={**broken.protocol, "config": None})])


def test_every_command_says_what_makes_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "records.jsonl"
    for kind in FIGURES.values():
        if kind.file.endswith(".json"):
            continue
        result = plot(kind.name, "--records", path, "--out", tmp_path / "figure")
        assert result.exit_code == 2 and not list(tmp_path.glob("figure*")), kind.name
        assert f"{path}: no such file" in result.stderr and result.stderr.count("\n") == 1
        assert (
            f"`{kind.made_by}` makes it" if kind.made_by else "no command of this version makes it"
        ) in result.stderr


def test_figures_of_one_file_read_it_once(tmp_path):
    path = written(tmp_path / "bench.jsonl", *latencies())
    latency, known = FIGURES["latency"], {}
    first = latency.make([path], known)[1]
    path.unlink()
    path.touch()  # where there was something to read, and is nothing
    assert latency.make([path], known)[1] == first and len(known) == 1
    with pytest.raises(NoRecords, match="samples that leave at a tap"):
        FIGURES["time-to-answer"].make([path], known)


def test_all_says_what_is_missing_and_draws_the_rest(tmp_path):
    path = written(tmp_path / "sweep.jsonl", *sweep())
    result = plot("all", "--records", path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert {file.stem for file in (tmp_path / "out").iterdir()} == {"landscape"}
    left_out = [line for line in result.output.splitlines() if line.startswith("Left out: ")]
    assert len(left_out) == len(FIGURES) - 1
    assert any("latency" in line and "`auxhead-tune bench` makes it" in line for line in left_out)
    assert json.loads((tmp_path / "out" / "landscape.json").read_text())["heads"]
