"""What stands on a figure's axes is what its numbers say: in which panel, in which unit, from where to where."""

import json
import math
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from auxhead.autotune.records.comparison import NEGLIGIBLE
from auxhead.plots.figures import bench, footprint, pareto, profile, reports, roofline, sweep, timeline
from auxhead.plots.style import ORANGE, PURPLE
from matplotlib.colors import to_hex

GALLERY = Path(__file__).parents[3] / "plots" / "gallery"


def gallery(name):
    return json.loads((GALLERY / f"{name}.json").read_text())


def labelled(axes):
    """The lines that have a label, by it, each as x and y."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def points(axes):
    """All points of all lines that have markers alone."""
    return sorted(
        (float(x), float(y))
        for line in axes.lines
        if line.get_linestyle() == "None"
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    )


def approx(values):
    """Numbers that a list or a tuple may hold but for rounding."""
    return pytest.approx(list(values))


def test_exits():
    drawn = gallery("exits")
    above, below = reports.exits_figure(drawn).axes
    assert [bar.get_height() for bar in above.patches] == approx(drawn["share_percent"])
    lines = labelled(below)
    assert lines["exit, if it answered all"][1] == drawn["accuracy_on_all_percent"]
    answering = [(place, one) for place, one in enumerate(drawn["accuracy_percent"]) if one is not None]
    assert list(zip(*lines["images that leave here"], strict=True)) == answering
    assert set(lines["full network"][1]) == {drawn["full_accuracy_percent"]}


def test_latency():
    drawn = gallery("latency")
    axes = {one.get_title(loc="left"): one for one in bench.latency_figure(drawn).axes}
    for classes, variants in drawn["classes"].items():
        panel = axes[f"latency, {int(classes):,} classes a head"]
        assert panel.get_yscale() == panel.get_xscale() == "log" and panel.get_ylim()[0] < 1000
        lines, bands = labelled(panel), [set(band.get_paths()[0].vertices[:, 1]) for band in panel.collections]
        assert len(bands) == len(variants)
        for (name, its), band in zip(variants.items(), bands, strict=True):
            batches, us = lines[bench.LATENCY[name].label]
            assert batches == [one["batch"] for one in its] and us == [one["host_us"]["median"] for one in its]
            assert band == {one["host_us"][end] for one in its for end in ("median", "p99")}
    for name, unit in (("latency", "host"), ("device time", "device")):
        panel = axes[f"added by the heads: {name}"]
        found = [list(line.get_ydata()) for line in panel.lines if len(line.get_xdata()) > 2]
        bands = [sorted({float(y) for y in band.get_paths()[0].vertices[:, 1]}) for band in panel.collections]
        wanted, ends = [], []
        for variants in drawn["classes"].values():
            for variant in bench.ADDED:
                if not (its := [one for one in variants.get(variant, []) if "bare" in one]):
                    continue
                wanted.append(approx(100 * one["bare"][f"{unit}_ratio"] - 100 for one in its))
                over = [100 * one[f"{unit}_us"][end] / one["bare"][f"{unit}_us"] - 100 for one in its
                        for end in ("p20", "p80")]  # fmt: skip
                ends.append(approx(sorted(set(over))))
        assert found == wanted and bands == ends


def test_roofline():
    drawn = gallery("roofline")
    _, left, right = roofline.roofline_figure(drawn).axes
    heads = drawn["heads"]
    assert points(left) == [
        approx(one) for one in sorted((head["bytes"] / 1e6, us) for head in heads for us in head["us"].values())
    ]
    rates = sorted((head["flop_per_byte"], rate) for head in heads for rate in head["gflop_per_second"].values())
    assert points(right) == [approx(one) for one in rates]
    for axes in (left, right):
        assert axes.get_xscale() == axes.get_yscale() == "log"
    hollow = [float(x) for line in left.lines if line.get_markerfacecolor() == "none" for x in line.get_xdata()]
    many = [head["bytes"] / 1e6 for head in heads if head["classes"] >= 100 for _ in head["us"]]
    assert sorted(hollow) == approx(sorted(many))
    bytes_a_us = drawn["copy_gb_per_second"] * 1e9 / 1e6
    megabytes, us = labelled(left)["bytes / copy bandwidth"]
    assert us == approx(one * 1e6 / bytes_a_us for one in megabytes)
    (later,) = (xy[1] for label, xy in labelled(left).items() if label.startswith("the same +"))
    assert later == approx(one + drawn["least_fused_us"] for one in us)
    (roof,) = (line for line in right.lines if line.get_color() == "black")
    assert list(roof.get_ydata()) == approx(one * drawn["copy_gb_per_second"] for one in roof.get_xdata())


def test_footprint():
    drawn = gallery("footprint")
    batches = drawn["batches"]
    panels = footprint.footprint_figure(drawn).axes[: 2 * len(batches)]
    rows = ("added", ("low", "high"), -math.inf, 12.0), ("hidden", ("p20", "p80"), -100.0, math.inf)
    for index, axes in enumerate(panels):
        name, ends, least, most = rows[index // len(batches)]
        found = list(batches.values())[index % len(batches)]
        bars = [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in axes.lines]
        assert axes.get_xscale() == "log"
        for one in found["points"]:
            share, (low, high) = one["occupancy_percent"], (one[f"{name}_{end}"] for end in ends)
            at = min(max(one[f"{name}_percent"], least), most)
            assert ([share] * 2, [min(max(low, least), most), min(max(high, least), most)]) in bars
            assert ([one["occupancy_p20"], one["occupancy_p80"]], [at, at]) in bars
        if found["boundary"] is not None:
            assert any(set(x) == {found["boundary"]["occupancy_percent"]} for x, _ in bars)


def test_pareto():
    drawn = gallery("pareto")
    for axes, panel in zip(pareto.pareto_figure(drawn).axes, drawn["panels"], strict=False):
        lines = labelled(axes)
        for name, series in panel["runners"].items():
            assert lines[pareto.LINES[name].label] == (series["mean_us"], series["accuracy_percent"])
        (front,) = (line for line in axes.lines if line.get_label() == "Pareto front")
        assert lines["Pareto front"] == tuple(map(list, zip(*panel["front"], strict=True)))
        assert front.get_drawstyle() == "steps-post", "until the next point nothing is more accurate"
        assert axes.get_xscale() == "log" and axes.get_title(loc="left") == f"batch {panel['batch']}"


def boxes(collection):
    return [tuple(map(float, path.get_extents().extents)) for path in collection.get_paths()]


def test_timeline():
    drawn = gallery("timeline")
    above, below = timeline.timeline_figure(drawn).axes
    trunk, joining, *heads = above.collections
    assert boxes(trunk) == [approx((begin, 1.0, end, 1.6)) for begin, end in drawn["trunk"]]
    assert boxes(joining) == [approx((begin, 1.0, end, 1.6)) for begin, end in drawn["joining"]]
    for (whole, covered), launch in zip(zip(heads[::2], heads[1::2], strict=True), drawn["heads"], strict=True):
        assert boxes(whole) == [approx((launch["begin"], 0.0, launch["end"], 0.6))]
        assert boxes(covered) == [approx((begin, 0.0, end, 0.6)) for begin, end in launch["under_the_trunk"]]
    stalls = [list(line.get_xdata()) for line in above.lines]
    assert stalls == [approx((drawn["span_us"] - drawn["join_stall_us"], drawn["span_us"]))]
    assert below.get_ylim() == (-0.5, drawn["sm_count"] - 0.5)
    colours = [to_hex(colour).upper() for colour in below.collections[0].get_facecolors()]
    joins = [launch == len(drawn["heads"]) for launch, *_ in drawn["programs"]]
    assert colours == [PURPLE if join else ORANGE for join in joins] and True in joins


def test_time_to_answer():
    drawn = gallery("time-to-answer")
    for axes, lines in zip(bench.time_to_answer_figure(drawn).axes, drawn["batches"].values(), strict=False):
        assert axes.get_ylim()[0] == 0
        for bars in axes.containers:
            (name,) = (one for one, line in bench.TO_ANSWER.items() if line.label == bars.get_label())
            line, _, (columns,) = bars.lines
            its = lines[name]
            assert list(line.get_xdata()) == [drawn["exits"].index(one["exit"]) for one in its]
            assert list(line.get_ydata()) == [one["host_us"]["median"] for one in its]
            ends = [tuple(float(y) for _, y in segment) for segment in columns.get_segments()]
            assert ends == [approx((one["host_us"]["p20"], one["host_us"]["p80"])) for one in its]


def test_profile():
    drawn = gallery("profile")
    launches, answer, kernels, api = profile.profile_figure(drawn).axes
    for axes, wanted in (
        (launches, drawn["launches"]),
        (kernels, drawn["kernels"]),
        (answer, {side: us["median"] for side, us in drawn["answer_us"].items()}),
    ):
        assert [bar.get_width() for bar in axes.patches] == list(wanted.values())
        top, bottom = axes.get_ylim()
        assert top > bottom, "before above after"
    spread = [(list(line.get_xdata()), list(line.get_ydata())) for line in answer.lines]
    assert spread == [([us["p20"], us["p80"]], [place] * 2) for place, us in enumerate(drawn["answer_us"].values())]
    for place, parts in enumerate(drawn["api_us"].values()):
        bars = [bar for bar in api.patches if round(bar.get_y() + bar.get_height() / 2) == place]
        assert [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars] == [
            approx(ends) for ends in pairwise(accumulate(parts.values(), initial=0.0))
        ]


def test_ranks():
    configs = [
        {"alone_over_fastest_alone_percent": alone, "network_over_fastest_alone_percent": network, "verdict": verdict}
        for alone, network, verdict in (
            (0.0, [0.0, 0.0, 0.0], sweep.SAME), (3.0, [0.1, -0.5, 0.9], sweep.SAME),
            (7.0, [2.0, 1.2, 4.0], sweep.SLOWER), (9.0, [-3.0, -3.5, -1.0], sweep.FASTER),
        )
    ]  # fmt: skip
    drawn = {"title": "t", "stamp": "s", "rank_counts": [[5, 1], [0, 4]], "heads": [{"batch": 8, "configs": configs}]}
    counts, axes = sweep.ranks_figure(drawn).axes
    assert counts.images[0].get_array().tolist() == drawn["rank_counts"]
    assert counts.get_xlabel().startswith("rank in the network") and counts.get_ylabel() == "rank alone"
    found = [(list(bars.lines[0].get_xdata()), list(bars.lines[0].get_ydata())) for bars in axes.containers]
    assert found == [([3.0], [0.1]), ([7.0], [2.0]), ([9.0], [-3.0])]
    ends = [bars.lines[2][0].get_segments()[0][:, 1].tolist() for bars in axes.containers if bars.lines[2]]
    assert ends == [[1.2, 4.0], [-3.5, -1.0]]
    assert axes.patches[0].get_extents().height > 0
    band = axes.patches[0].get_path().get_extents(axes.patches[0].get_patch_transform())
    assert (band.y0, band.y1) == approx((-100 * NEGLIGIBLE, 100 * NEGLIGIBLE))


def test_landscape():
    configs = [
        {"num_warps": warps, "block_c": channels, "over_fastest": over, "within_noise": over == 1.0, "rule": rule}
        for warps, channels, over, rule in (
            (4, 8, 1.0, False), (8, 32, 1.5, True), (8, 8, 2.0, False), (4, 8, 3.0, False),
        )
    ]  # fmt: skip
    heads = [{"head": "layer1", "batch": 1, "configs": configs}]
    axes = sweep.landscape_figure({"title": "t", "stamp": "s", "noise_percent": 1.0, "heads": heads}).axes[0]
    norm = sweep.LogNorm(1.0, 4.0)
    filled = {(box.get_x() + 0.5, box.get_y() + 0.5): box.get_facecolor() for box in axes.patches if box.get_fill()}
    wanted = {(0, 0): 1.0, (1, 1): 1.5, (1, 0): 2.0}  # warps across, channels up; of two in a cell the faster
    assert filled == {cell: sweep.COLOURS(norm(over)) for cell, over in wanted.items()}
    rule, untried = axes.lines
    assert (list(rule.get_xdata()), list(rule.get_ydata())) == ([1], [1])
    assert (list(untried.get_xdata()), list(untried.get_ydata())) == ([0], [1])
    (tied,) = (box for box in axes.patches if not box.get_fill())
    assert (tied.get_x(), tied.get_y()) == (-0.5, -0.5)
