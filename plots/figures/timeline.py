"""Figure "timeline", one replay of a captured network with the SMs that heads run on; and as a trace for Perfetto."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ...autotune.records.intervals import common, merged
from ...autotune.records.record import Record
from ...model.basics.files import writing
from ..records import NoRecords, network_of, read_kinds, stamp
from ..style import BLUE, GREY, ORANGE, PURPLE, bars, frame, new_figure, note, tidy

#: Bottom and height of the lanes.
_TRUNK_LANE, _SIDE_LANE = (1.0, 0.6), (0.0, 0.6)
#: Below this share of the heads' time under the trunk the title says "only".
_LITTLE = 0.5
#: Roles of kernels: of the trunk, of heads on the side stream, or in the launch that joins both streams.
TRUNK, SIDE, JOIN = "trunk", "side", "join"
#: Name of the kernel that packs features for a launch of heads, which is the next one of its role.
_PACKS = "pack_kernel"


class Timeline(NamedTuple):
    """One recorded replay, and the summary of all replays of its run; both with what was ``measured``."""

    record: Record
    replay: dict[str, Any]
    summary: Record
    all_replays: dict[str, Any]

    def kernels(self, role: str) -> list[dict[str, Any]]:
        """Return the kernels of a role in order of time."""
        return [kernel for kernel in self.replay["kernels"] if kernel["role"] == role]

    @property
    def network(self) -> str:
        """The network in words."""
        cell = self.record.cell
        return f"{network_of(self.record)}, batch {cell['batch']}, {cell['classes']:,} classes"

    @property
    def launches(self) -> list[list[str]]:
        """The taps whose heads each launch on the side stream holds."""
        taps = self.record.cell["taps"]
        ends = [taps.index(fork) + 1 for fork in self.record.protocol["forks"]]
        return [taps[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def timelines(records: Sequence[Record]) -> list[Timeline]:
    """Return the last timeline of each network, in the order in which they were measured."""
    of_all = [one for one in records if one.kind == "overlap" and one.error is None]
    summaries = {one.run: (one, one.measured) for one in of_all if one.measured}
    found: dict[tuple[str, ...], Timeline] = {}
    for one in records:
        if one.kind == "timeline" and one.measured is not None and one.run in summaries:
            found.pop(one.key, None)
            found[one.key] = Timeline(one, one.measured, *summaries[one.run])
    if not found:
        raise NoRecords("no timeline with the summary of its run among the records")
    return list(found.values())


def timeline_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return what ran when in a replay of the network measured last: microseconds since it began, shares in percent."""
    timeline = timelines(records)[-1]
    replay, all_replays, record = timeline.replay, timeline.all_replays, timeline.record
    trunk, side = [_interval(one) for one in timeline.kernels(TRUNK)], _with_packs(timeline.kernels(SIDE))
    launches = timeline.launches
    numbers = accumulate(map(len, launches), initial=1)  # of the first head of each launch
    covered = [common(merged([one]), merged(trunk)) for one in side]
    of_all = None
    if all_replays["coverage"] is not None:
        percents = {name: _percent(value) for name, value in all_replays["coverage"].items()}
        of_all = {"coverage_percent": percents, "exposed_us": all_replays["exposed_us"]}
    (pair,) = (one for one in timeline.summary.paired if one["role"] == "trunk")
    return {
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


def _interval(kernel: Mapping[str, Any]) -> tuple[float, float]:
    return kernel["start_us"], round(kernel["start_us"] + kernel["duration_us"], 3)


def _with_packs(kernels: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the interval of each launch that decides, from the first one on that packs features for it."""
    found, begins = [], []
    for one in kernels:
        begins.append(one["start_us"])
        if not one["name"].startswith(_PACKS):
            found.append((begins[0], _interval(one)[1]))
            begins = []
    return found


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


def timeline_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw the lanes of the trunk and of the heads, and below the SMs that the heads' programs are on."""
    figure = new_figure(5.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.3))
    _lanes(above, numbers)
    _residency(below, numbers)
    xlabel = (
        f"us since the replay began, under the profiler (it makes replays {numbers['inflation']:.2f} times as long)"
    )
    below.set(xlabel=xlabel, xlim=(-0.01 * numbers["span_us"], 1.01 * numbers["span_us"]))
    return frame(figure, numbers)


def _lanes(axes: Axes, numbers: Mapping[str, Any]) -> None:
    axes.broken_barh(bars(numbers["trunk"]), _TRUNK_LANE, color=BLUE, edgecolor="white", linewidth=0.6)
    axes.broken_barh(bars(numbers["joining"]), _TRUNK_LANE, color=PURPLE, edgecolor="white", linewidth=0.6)
    for launch in numbers["heads"]:
        whole = (launch["begin"], launch["end"] - launch["begin"])
        axes.broken_barh([whole], _SIDE_LANE, facecolor="white", edgecolor=ORANGE, hatch="/////", linewidth=0.8)
        axes.broken_barh(bars(launch["under_the_trunk"]), _SIDE_LANE, color=ORANGE, linewidth=0)
        middle = launch["begin"] + whole[1] / 2
        note(axes, launch["label"], (middle, 0.0), (0, -3), ha="center", va="top", fontsize=8)
    stall = numbers["join_stall_us"]
    if stall > 0:
        end, top = numbers["span_us"], sum(_TRUNK_LANE)
        note(axes, f"join stall {stall:.1f} us", (end, top), (0, 4), ha="right", va="bottom", fontsize=8)
        axes.plot([end - stall, end], [top + 0.04] * 2, color="black", linewidth=1.2)
    axes.set_yticks([1.3, 0.3], ["trunk\n(high priority)", "heads\n(low priority)"])
    tidy(axes, "x", ylim=(-0.35, 1.95))
    axes.tick_params(axis="y", length=0)
    axes.legend(
        handles=_legend(numbers), frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, fontsize=8,
        handlelength=1.4, columnspacing=1.2, borderpad=0.0,
    )  # fmt: skip


def _legend(numbers: Mapping[str, Any]) -> list[Patch]:
    handles = [Patch(color=BLUE, label="trunk's kernels")]
    if numbers["heads"]:
        handles += [
            Patch(color=ORANGE, label="heads under the trunk"),
            Patch(facecolor="white", edgecolor=ORANGE, hatch="/////", label="heads exposed"),
        ]
    if numbers["joining"]:
        handles.append(Patch(color=PURPLE, label="late heads and classifier (join)"))
    return handles


def _residency(axes: Axes, numbers: Mapping[str, Any]) -> None:
    """Draw each program as a bar at the height of its SM's id."""
    programs, joining = numbers["programs"], len(numbers["heads"])
    corners = [
        [(begin, sm - 0.5), (end, sm - 0.5), (end, sm + 0.5), (begin, sm + 0.5)] for _, sm, begin, end in programs
    ]
    colours = [PURPLE if launch == joining else ORANGE for launch, *_ in programs]
    boxes = PolyCollection(corners, facecolors=colours, edgecolors="none", alpha=0.8)
    boxes.set_rasterized(True)  # they may be ten thousand
    axes.add_collection(boxes)
    used, last = len({sm for _, sm, _, _ in programs}), numbers["sm_count"]
    counted = f"{len(programs):,} programs of the heads, on {used} of {last} SMs; those of the trunk are not drawn"
    note(axes, counted, (0.0, 1.0), (0, 2), xycoords="axes fraction", va="bottom", fontsize=8, color=GREY)
    tidy(axes, "x", ylim=(-0.5, last - 0.5), ylabel="SM id\n(measured in the kernel)")


_JOINING = "joining launch: late heads, classifier, answer"
#: Numbers of the trace's lanes; SMs come last.
_LANES, _FIRST_SM_LANE = {TRUNK: 0, SIDE: 1, JOIN: 0}, 2


def write_trace(path: Path, out: Path) -> None:
    """Write the timelines of a file of records as a trace, compressed if its name ends in ".gz".

    Raises what ``read_kinds`` does; ``NoRecords`` names the command that makes them.
    """
    try:
        trace = chrome_trace(read_kinds([path], ("timeline", "overlap")))
    except NoRecords as error:
        raise NoRecords(f"{error}; `auxhead-tune overlap MODEL` makes it") from None
    content = (json.dumps(trace) + "\n").encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    with writing(out) as file:
        file.write(gzip.compress(content, mtime=0) if out.suffix == ".gz" else content)


def chrome_trace(records: Sequence[Record]) -> dict[str, Any]:
    """Return the timelines in the trace event format, each network a process; times are microseconds."""
    found = timelines(records)
    events = [event for pid, timeline in enumerate(found, start=1) for event in _process(pid, timeline)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {name: str(value) for name, value in found[0].record.environment.items()},
    }


def _process(pid: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    of_launch = [*(f"heads of {', '.join(taps)}" for taps in timeline.launches), _JOINING]
    programs = _in_lanes(timeline.replay["programs"])
    lanes = ["trunk (high priority)", "heads (low priority)", *(f"SM {sm}: programs of heads" for sm, _ in programs)]
    yield _metadata(pid, 0, "process_name", {"name": f"{timeline.network}; one replay under torch.profiler"})
    yield _metadata(pid, 0, "process_sort_index", {"sort_index": pid})
    for tid, name in enumerate(lanes):
        yield _metadata(pid, tid, "thread_name", {"name": name})
        yield _metadata(pid, tid, "thread_sort_index", {"sort_index": tid})
    names = iter(of_launch)
    for kernel in timeline.replay["kernels"]:
        arguments = {name: kernel[name] for name in ("stream", "grid", "block", "registers")}
        name = kernel["name"]
        if kernel["role"] != TRUNK:
            arguments = {"kernel": name, **arguments}
            name = "features of heads" if name.startswith(_PACKS) else next(names)
        yield _complete(pid, _LANES[kernel["role"]], name, kernel["start_us"], kernel["duration_us"], arguments)
    for tid, (sm, of_lane) in enumerate(programs, start=_FIRST_SM_LANE):
        for launch, _, begin, end in of_lane:
            name = of_launch[int(launch)]
            yield _complete(pid, tid, name, begin, round(end - begin, 3), {"SM": sm})


def _in_lanes(programs: Sequence[Sequence[float]]) -> list[tuple[int, list[Sequence[float]]]]:
    """Return lanes in the order of SMs, each as its SM and its programs, one after another.

    An SM has as many lanes as it ran programs at a time: viewers garble programs that overlap in one lane.
    """
    by_sm: dict[int, list[list[Sequence[float]]]] = {}
    for program in sorted(programs, key=lambda one: (one[2], one[3])):
        lanes = by_sm.setdefault(int(program[1]), [])
        free = next((lane for lane in lanes if lane[-1][3] <= program[2]), [])
        if not free:
            lanes.append(free)
        free.append(program)
    return [(sm, lane) for sm in sorted(by_sm) for lane in by_sm[sm]]


def _metadata(pid: int, tid: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _complete(pid: int, tid: int, name: str, begin: float, us: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "gpu", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": us, "args": arguments,
    }  # fmt: skip
