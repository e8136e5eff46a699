"""Figures of the cost of heads, exits and requests, and of two GPUs: what they take of made-up records, and refuse."""

import dataclasses

import pytest
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.records import NoRecords
from support.cost_records import head_records, pareto_records, profile_records
from support.pipeline_records import pipeline_records

LATENCY, PARETO, PROFILE, ROOFLINE = FIGURES["latency"], FIGURES["pareto"], FIGURES["profile"], FIGURES["roofline"]


def test_pareto_front_and_title():
    drawn = PARETO.numbers(pareto_records())
    first, second = drawn["panels"]
    assert (first["batch"], second["batch"]) == (1, 64)
    assert first["full"]["graph-bare"] == {"mean_us": 320.0, "accuracy_percent": pytest.approx(99.44)}
    assert first["runners"]["polled"]["mean_us"] == [345, 210, 130]
    assert first["runners"]["polled"]["thresholds"] == ["never", "calibrated 0.5 %", "calibrated 4 %"]
    # the cheapest thresholds, then gated at half a point, then the full network: all others are beaten by one of them
    assert first["front"] == [[110, pytest.approx(98.32)], [190, pytest.approx(99.16)], [320.0, pytest.approx(99.44)]]
    assert second["front"] == [[300, pytest.approx(98.32)], [440.0, pytest.approx(99.44)]]
    assert "1.7 times sooner (gated) at batch 1, no sooner at batch 64" in drawn["title"]
    assert "359 test images, one of them is 0.28 points" in drawn["stamp"]
    assert "no sooner at batch 1" in PARETO.numbers(pareto_records(batches=(1,), faster=0.5))["title"]


def test_pareto_takes_the_last_run_of_the_last_network():
    older, other = pareto_records("r0", faster=2.0), pareto_records("r2", "w0", batches=(1,), faster=3.0)
    expected = PARETO.numbers(pareto_records())
    assert PARETO.numbers([*older, *other, *pareto_records()]) == expected
    failed = dataclasses.replace(older[-1], run="r1", error="RuntimeError: no gates", measured=None)
    assert "failed: gated@cudnn: RuntimeError: no gates" in PARETO.numbers([*pareto_records(), failed])["stamp"]


def test_pareto_needs_the_full_network_and_a_runner():
    alone = [record for record in pareto_records() if record.variant.startswith("eager")]
    with pytest.raises(NoRecords, match="no measurement of the full network in a CUDA graph and of a runner"):
        PARETO.draw(alone)


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


def test_timelines_where_all_have_exits_compare_nothing():
    records = [dataclasses.replace(one, exits="50/50") if one.kind == "gpus" else one for one in pipeline_records()]
    with pytest.raises(NoRecords, match="no timelines of two of .* where nobody leaves"):
        FIGURES["gpus"].draw(records)
