"""Figures of the cost of heads, exits and requests, from hand-made records."""

import dataclasses
import json

import pytest
from auxhead.plots.figures.registry import FIGURES
from auxhead.plots.figures.roofline import flop
from auxhead.plots.records import NoRecords
from support.command_line import plot
from support.cost_records import head_records, latency_records, pareto_records, profile_records

LATENCY, PARETO, PROFILE, ROOFLINE = FIGURES["latency"], FIGURES["pareto"], FIGURES["profile"], FIGURES["roofline"]


MADE = {
    "pareto": (pareto_records, PARETO, ""),
    "roofline": (head_records, ROOFLINE, "auxhead-tune heads resnet18"),
    "profile": (profile_records, PROFILE, "auxhead-tune profile --checkpoint DIR"),
}


@pytest.mark.parametrize("name", MADE)
def test_it_can_be_drawn_and_the_command_says_what_is_missing(name, tmp_path):
    make, kind, made_by = MADE[name]
    missing = plot(name, "--records", tmp_path / "none.jsonl")
    how = f"`{made_by}` makes it" if made_by else "no command of this version makes it"
    assert missing.exit_code == 2 and "no such file" in missing.stderr and how in missing.stderr
    figure, drawn = kind.draw(make())
    figure.draw_without_rendering()
    assert json.loads(json.dumps(drawn, allow_nan=False)) == json.loads(json.dumps(kind.draw(make())[1]))
    assert "NVIDIA X100" in drawn["stamp"] and max(map(len, drawn["title"].split("\n"))) < 80


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


def test_the_operations_of_a_head():
    cell = {"samples": 2, "channels": 3, "height": 4, "width": 6, "grid_h": 2, "grid_w": 1, "classes": 5}
    assert flop(cell) == 2 * 3 * 4 * 6 + 2 * 2 * (3 * 2) * 5


def test_roofline_numbers_and_title():
    records = head_records(batches=(1, 128), floor=4.0, bandwidth=4.0e12)
    drawn = ROOFLINE.numbers(records)
    assert len(drawn["heads"]) == 16 and drawn["copy_gb_per_second"] == 4000.0
    largest = next(head for head in drawn["heads"] if head["head"] == "resnet18 layer1, batch 128, 10 classes")
    moved = 2 * (128 * 64 * 56 * 56 + 640) + 4 * 1280
    operations = 128 * 64 * 56 * 56 + 2 * 128 * 64 * 10
    assert (largest["bytes"], largest["flop"]) == (moved, operations)
    assert largest["us"]["fused"] == pytest.approx(4.0 + 1.5 * moved / 4e6)
    assert largest["gflop_per_second"]["eager"] == pytest.approx(operations / largest["us"]["eager"] / 1e3)
    assert largest["flop_per_byte"] == pytest.approx(operations / moved)
    waiting = [head for head in drawn["heads"] if head["us"]["fused"] > 10 * head["bytes_us"]]
    assert drawn["title"].startswith(f"{len(waiting)} of 16 fused heads are bound by latency: 4.0 to ")
    share = max(head["bytes_us"] / head["us"]["fused"] for head in drawn["heads"])
    assert f"the best reaches {100 * share:.0f} % of a copy's bandwidth" in drawn["title"]
    assert "None of 16 fused heads" in ROOFLINE.numbers(head_records(batches=(1, 128), floor=1e-3))["title"]


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


def test_what_heads_add_is_drawn_in_per_cent_of_the_trunk_with_a_band_of_percentiles():
    """The line is the ratio of the same rounds; the band is the times' 20th and 80th percentile over the trunk's."""
    figure, drawn = LATENCY.draw(latency_records())
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    for name in ("latency", "device time"):
        axes = figure.axes[titles.index(f"added by the heads: {name}")]
        lines = [line for line in axes.lines if len(line.get_xdata()) == 2 and list(line.get_xdata()) == [1, 8]]
        assert [list(line.get_ydata()) for line in lines] == [pytest.approx([51.0] * 2), pytest.approx([11.0] * 2)]
        bands = [band.get_paths()[0].vertices for band in axes.collections]
        for band, factor in zip(bands, (1.5, 1.1), strict=True):
            ends = {round(float(y), 6) for _, y in band}
            assert ends == {round(100 * (factor * 0.9 - 1), 6), round(100 * (factor * 1.2 - 1), 6)}
    assert drawn["title"] == (
        "2 overlapped heads of 10 classes add 11 to 11 % of device time, 11 to 11 % of latency;\n"
        "plain heads in line add 51 to 51 % and 51 to 51 %"
    )
    above = figure.axes[titles.index("latency, 10 classes a head")]
    ends = [sorted({float(y) for _, y in band.get_paths()[0].vertices}) for band in above.collections]
    assert [400.0, 800.0, 1600.0, 3200.0] == ends[-1] or [200.0, 400.0, 1600.0, 3200.0] in ends
