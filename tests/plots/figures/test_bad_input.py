"""Figures from made-up sweeps and benchmarks: their titles, and records that they refuse."""

import dataclasses
import json

import pytest
from auxhead.autotune.records.record import BadRecord, Record
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.figures.sweep import FASTER, SAME, SLOWER
from auxhead.plots.records import NoRecords
from auxhead.plots.sweep_heads import Swept
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
    return Record(kind, cell, exits, variant, "r", utc, ENVIRONMENT, protocol, us, us, **changed)


def swept(variant, place, us, warps=4, kernel="k"):
    """Timed in five captures, two percent apart, of four rounds, beside a rule that takes 10 us."""
    capture = [0.99, 0.995, 1.0, 1.005, 1.01]
    samples, baseline = ([[factor * mean] * 4 for factor in capture] for mean in (us, 10.0))
    cell = SHAPE if place == "alone" else {**SHAPE, "model": "m", "tap": "early"}
    config = {"num_warps": warps, "block_c": 16}
    protocol = {"place": place, "kernel": kernel, "config": config, "rounds": 4, "captures": 5}
    pair = {"role": "rule", "variant": "rule", "samples": baseline}
    times = {"median": us, "p20": us, "p80": us, "samples": samples}
    return record("sweep", cell, variant, times, protocol, paired=[pair])


def sweep(**in_network):
    """Alone, a is the fastest; in the network, what is said."""
    alone = {"a": 8.0, "rule": 10.0, "b": 12.0}
    records = [swept(name, "alone", us, warps) for warps, (name, us) in zip((2, 4, 8), alone.items(), strict=True)]
    return records + [swept(name, "network", us) for name, us in in_network.items()]


def test_a_winner_alone_that_surely_loses_in_the_network():
    drawn = FIGURES["ranks"].numbers(Swept.of(sweep(a=10.0, rule=9.0, b=10.0)))
    (head,) = drawn["heads"]
    assert [(one["config"], one["rank_network"]) for one in head["configs"]][:2] == [("a", 2), ("rule", 1)]
    assert [one["verdict"] for one in head["configs"]] == [SAME, FASTER, SAME]
    assert drawn["title"].startswith("In 1 of 1 heads") and "1 of 2 differences" in drawn["title"]


def test_a_difference_within_the_noise_is_none():
    drawn = FIGURES["ranks"].numbers(Swept.of(sweep(a=10.0, rule=9.9, b=13.0)))
    assert [one["verdict"] for one in drawn["heads"][0]["configs"]] == [SAME, SAME, SLOWER]
    assert drawn["title"].startswith("In 0 of 1 heads")


def test_only_the_kernel_that_was_swept_last_counts():
    old = [swept("old", place, 1.0, kernel="before") for place in ("alone", "network")]
    (head,) = FIGURES["ranks"].numbers(Swept.of(old + sweep(a=9.0, rule=10.0)))["heads"]
    assert [one["config"] for one in head["configs"]] == ["a", "rule"]


def test_the_landscape_has_what_was_tried_and_what_ties():
    drawn = FIGURES["landscape"].numbers(Swept.of([*sweep(), swept("c", "alone", 8.02, warps=16)]))
    configs = drawn["heads"][0]["configs"]
    assert [(one["config"], one["num_warps"], one["within_noise"]) for one in configs] == [
        ("a", 2, True), ("c", 16, True), ("rule", 4, False), ("b", 8, False),
    ]  # fmt: skip
    assert configs[-1]["over_fastest"] == pytest.approx(1.5) and "in 0 of 1 heads" in drawn["title"]


def benched(variant, batch, us, exits="never", bare=None):
    times = {"median": us, "p20": us - 1, "p80": us + 1, "captures": [us], "p99": us + 2}
    ratios = {"host_us": bare, "host_ratio": us / bare, "device_us": bare, "device_ratio": us / bare} if bare else {}
    paired = [{"role": "bare", "variant": "graph-bare@cudnn", **ratios}] if bare else []
    protocol = {"rounds": 50, "captures": 5}
    return record("bench", {**CELL, "batch": batch}, variant, times, protocol, exits, paired=paired)


def test_latency_says_what_heads_add():
    records = [benched("graph-bare@cudnn", batch, 100.0) for batch in (1, 8)]
    records += [benched("overlapped@cudnn", batch, us, bare=100.0) for batch, us in ((1, 103.0), (8, 107.0))]
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
    broken = sweep(a=1.0, rule=1.0)[0]
    with pytest.raises(BadRecord, match="config"):
        Swept.of([dataclasses.replace(broken, protocol={**broken.protocol, "config": None})])


BY_SWEEP = [kind.name for kind in FIGURES.values() if "sweep" in kind.kinds]


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
    path = written(tmp_path / "sweep.jsonl", *sweep(a=10.0, rule=9.0))
    kinds, known = [FIGURES[name] for name in BY_SWEEP], {}
    first = kinds[0].make([path], known)[1]
    path.unlink()
    path.touch()  # where there was something to read, and is nothing
    assert all(kind.make([path], known)[1]["heads"] for kind in kinds)
    assert kinds[0].make([path], known)[1] == first and len(known) == 2, "the records, and the heads in them"


def test_all_says_what_is_missing_and_draws_the_rest(tmp_path):
    path = written(tmp_path / "sweep.jsonl", *sweep(a=10.0, rule=9.0))
    result = plot("all", "--records", path, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert {file.stem for file in (tmp_path / "out").iterdir()} == set(BY_SWEEP)
    left_out = [line for line in result.output.splitlines() if line.startswith("Left out: ")]
    assert len(left_out) == len(FIGURES) - len(BY_SWEEP)
    assert any("latency" in line and "`auxhead-tune bench` makes it" in line for line in left_out)
    assert json.loads((tmp_path / "out" / "ranks.json").read_text())["heads"]
