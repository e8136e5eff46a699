"""Figure "timeline": one replay of a captured network, stream by stream, with the SMs that heads run on."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...autotune.records.intervals import common, merged
from ...autotune.records.record import Record
from ..records import stamp
from ..style import BLUE, GREY, ORANGE, PURPLE, frame, new_figure, note, tidy
from ..timelines import JOIN, SIDE, TRUNK, Timeline, timelines

#: Bottom and height of the lanes.
_TRUNK_LANE, _SIDE_LANE = (1.0, 0.6), (0.0, 0.6)
#: Below this share of the heads' time under the trunk the title says "only".
_LITTLE = 0.5


def draw(records: Sequence[Record]) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it.

    Of several networks the one measured last is drawn; in microseconds since the replay began, shares in percent.
    """
    timeline = timelines(records)[-1]
    replay, all_replays, record = timeline.replay, timeline.all_replays, timeline.record
    trunk, side = ([_interval(one) for one in timeline.kernels(role)] for role in (TRUNK, SIDE))
    launches = timeline.launches
    numbers = accumulate(map(len, launches), initial=1)  # of the first head of each launch
    covered = [common(merged([one]), merged(trunk)) for one in side]
    of_all = None
    if all_replays["coverage"] is not None:
        percents = {name: _percent(value) for name, value in all_replays["coverage"].items()}
        of_all = {"coverage_percent": percents, "exposed_us": all_replays["exposed_us"]}
    (pair,) = (one for one in timeline.summary.paired if one["role"] == "trunk")
    drawn = {
        "title": _title(timeline, pair),
        "stamp": stamp([record, timeline.summary], *_how(timeline)),
        "network": timeline.network,
        "trunk": [list(one) for one in trunk],
        "heads": [
            {
                "begin": begin,
                "end": end,
                "under_the_trunk": [list(part) for part in parts],
                "taps": taps,
                "label": f"head {first}" if len(taps) == 1 else f"heads {first}-{first + len(taps) - 1}",
            }
            for (begin, end), parts, taps, first in zip(side, covered, launches, numbers, strict=False)
        ],
        "joining": [list(_interval(one)) for one in timeline.kernels(JOIN)],
        "join_stall_us": replay["join_stall_us"],
        "span_us": replay["span_us"],
        "coverage_percent": _percent(replay["coverage"]),
        "all_replays": of_all,
        "inflation": all_replays["inflation"]["both"],
        "ratio_to_trunk": {name: pair[name] for name in ("device_ratio", "low", "high")},
        "programs": replay["programs"],
        "clocks_differ_us": replay["clocks_differ_us"],
        "sm_count": record.environment["sm_count"],
    }
    return _figure(drawn), drawn


def _interval(kernel: Mapping[str, Any]) -> tuple[float, float]:
    return kernel["start_us"], round(kernel["start_us"] + kernel["duration_us"], 3)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100.0 * share, 2)


def _title(timeline: Timeline, pair: Mapping[str, float]) -> str:
    heads, beside = len(timeline.record.cell["taps"]), sum(map(len, timeline.launches))
    added = 100.0 * (pair["device_ratio"] - 1.0)
    low, high = (100.0 * (pair[name] - 1.0) for name in ("low", "high"))
    cost = f"all heads together add {added:.1f} % to the network's time (99 %: {low:.1f} to {high:.1f} %)"
    coverage = timeline.all_replays["coverage"]
    if coverage is None:
        return f"Nothing runs beside the trunk, all {heads} heads with the classifier at its end;\n{cost}"
    share = coverage["median"]
    whose = f"{heads} heads" if beside == heads else f"{beside} of {heads} heads"
    little = "only " if share < _LITTLE else ""
    return f"{whose} beside the trunk: {little}{100 * share:.0f} % of their time lies under its kernels;\n{cost}"


def _how(timeline: Timeline) -> list[str]:
    """Return the lines of the small print on what is shown."""
    coverage, replays = timeline.all_replays["coverage"], timeline.record.protocol["replays"]
    slower = 100.0 * (timeline.replay["recording_inflation"] - 1.0)
    shown = (
        f"Shown: the one of median length of {replays} replays under torch.profiler whose heads record their programs "
        f"({slower:+.1f} % in length)"
    )
    if coverage is not None and timeline.replay["coverage"] is not None:
        median, low, high = (100.0 * coverage[name] for name in ("median", "p20", "p80"))
        own = 100.0 * timeline.replay["coverage"]
        shown += f": {own:.0f} % under the trunk; without recording {median:.0f} % ({low:.0f}-{high:.0f} %, p20-p80)"
    captures, rounds = timeline.summary.protocol["captures"], timeline.summary.protocol["rounds"]
    timed = f"Time with and without heads: no profiler, {rounds} rounds of {captures} fresh captures each"
    clocks = f"Programs' times are good to {timeline.replay['clocks_differ_us']:.1f} us: they read a clock of their own"
    return [f"{timeline.network}. {timed}.", f"{shown}.", f"{clocks}."]


def _figure(drawn: Mapping[str, Any]) -> Figure:
    figure = new_figure(5.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.3))
    _lanes(above, drawn)
    _residency(below, drawn)
    below.set_xlabel(
        f"us since the replay began, under the profiler (it makes replays {drawn['inflation']:.2f} times as long)"
    )
    below.set_xlim(-0.01 * drawn["span_us"], 1.01 * drawn["span_us"])
    return frame(figure, drawn)


def _lanes(axes: Axes, drawn: Mapping[str, Any]) -> None:
    axes.broken_barh(_bars(drawn["trunk"]), _TRUNK_LANE, color=BLUE, edgecolor="white", linewidth=0.6)
    axes.broken_barh(_bars(drawn["joining"]), _TRUNK_LANE, color=PURPLE, edgecolor="white", linewidth=0.6)
    for launch in drawn["heads"]:
        whole = (launch["begin"], launch["end"] - launch["begin"])
        axes.broken_barh([whole], _SIDE_LANE, facecolor="white", edgecolor=ORANGE, hatch="/////", linewidth=0.8)
        axes.broken_barh(_bars(launch["under_the_trunk"]), _SIDE_LANE, color=ORANGE, linewidth=0)
        middle = launch["begin"] + whole[1] / 2
        note(axes, launch["label"], (middle, 0.0), (0, -3), ha="center", va="top", fontsize=8)
    stall = drawn["join_stall_us"]
    if stall > 0:
        end, top = drawn["span_us"], sum(_TRUNK_LANE)
        note(axes, f"join stall {stall:.1f} us", (end, top), (0, 4), ha="right", va="bottom", fontsize=8)
        axes.plot([end - stall, end], [top + 0.04] * 2, color="black", linewidth=1.2)
    axes.set_yticks([1.3, 0.3], ["trunk\n(high priority)", "heads\n(low priority)"])
    axes.set_ylim(-0.35, 1.95)
    tidy(axes, "x")
    axes.tick_params(axis="y", length=0)
    axes.legend(
        handles=_legend(drawn), frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, fontsize=8,
        handlelength=1.4, columnspacing=1.2, borderpad=0.0,
    )  # fmt: skip


def _bars(intervals: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    return [(begin, end - begin) for begin, end in intervals]


def _legend(drawn: Mapping[str, Any]) -> list[Patch]:
    handles = [Patch(color=BLUE, label="trunk's kernels")]
    if drawn["heads"]:
        handles += [
            Patch(color=ORANGE, label="heads under the trunk"),
            Patch(facecolor="white", edgecolor=ORANGE, hatch="/////", label="heads exposed"),
        ]
    if drawn["joining"]:
        handles.append(Patch(color=PURPLE, label="late heads and classifier (join)"))
    return handles


def _residency(axes: Axes, drawn: Mapping[str, Any]) -> None:
    """Draw each program as a bar at the height of its SM's id."""
    programs, joining = drawn["programs"], len(drawn["heads"])
    corners = [
        [(begin, sm - 0.5), (end, sm - 0.5), (end, sm + 0.5), (begin, sm + 0.5)] for _, sm, begin, end in programs
    ]
    colours = [PURPLE if launch == joining else ORANGE for launch, *_ in programs]
    bars = PolyCollection(corners, facecolors=colours, edgecolors="none", alpha=0.8)
    bars.set_rasterized(True)  # they may be ten thousand
    axes.add_collection(bars)
    used, last = len({sm for _, sm, _, _ in programs}), drawn["sm_count"]
    axes.set_ylim(-0.5, last - 0.5)
    axes.set_ylabel("SM id\n(measured in the kernel)")
    said = f"{len(programs):,} programs of the heads, on {used} of {last} SMs; those of the trunk are not drawn"
    note(axes, said, (0.0, 1.0), (0, 2), xycoords="axes fraction", va="bottom", fontsize=8, color=GREY)
    tidy(axes, "x")
