"""Figures of the benchmark: "latency" by batch size, and "time-to-answer" by the exit at which samples leave."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from ...autotune.records.record import Record
from ..records import NEVER, NoRecords, known_percentiles, most_measured, rounds, stamp
from ..style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    Line,
    frame,
    heading,
    legend_beside,
    line_with_band,
    new_figure,
    tidy,
)  # fmt: skip

BARE, OURS, PLAIN, FLOOR = "graph-bare@cudnn", "overlapped@cudnn", "graph-naive@cudnn", "truncated@cudnn"
#: Variants that skip work; the title of "time-to-answer" names the best of them.
SKIPPING = ("gated@cudnn", "polled@cudnn")
#: The variants of "latency"; colours tell the heads, dashes the way to run.
LATENCY = {
    "eager-naive-item@as_is": Line("plain heads, eager, .item() after each", ORANGE, ":", "s"),
    "eager-bare@as_is": Line("no heads, eager", GREY, ":", "o"),
    "compile-naive-reduce-overhead@as_is": Line("plain heads, torch.compile", ORANGE, "--", "s"),
    "compile-bare-reduce-overhead@as_is": Line("no heads, torch.compile", GREY, "--", "o"),
    "graph-bare@as_is": Line("no heads, CUDA graph", GREY, "-.", "o"),
    "graph-naive@cudnn": Line("plain heads in line, graph of fused conv.", ORANGE, "-", "s"),
    "graph-naive-forked@cudnn": Line("plain heads on a side stream, same graph", AMBER, "-", "^"),
    "graph-fused@cudnn": Line("auxhead: fused heads in line, same graph", SKY, "-", "v"),
    "overlapped@cudnn": Line("auxhead: fused heads, overlapped", BLUE, "-", "D"),
    "graph-bare@cudnn": Line("no heads, graph of fused conv.", "black", "-", "o"),
}
#: The variants of "time-to-answer".
TO_ANSWER = {
    BARE: Line("whole network, no heads", GREY, ":", ""),
    OURS: Line("auxhead, overlapped: skips nothing", BLUE, "-", "D"),
    "polled@cudnn": Line("auxhead, polled: the host stops", ORANGE, "-", "s"),
    "gated@cudnn": Line("auxhead, gated: the GPU stops", GREEN, "-", "^"),
    FLOOR: Line("floor: network cut off there", "black", "-", "o"),
}
#: Variants in the lower panels, which differ from ``BARE`` by their heads alone.
ADDED = ("graph-naive@cudnn", "graph-naive-forked@cudnn", "graph-fused@cudnn", OURS)
BANDS = "Bands: latency from the median to the 99th percentile of requests; what is added, 20th to 80th."


def latency_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return latency and device time by number of classes, variant and batch size.

    Records without the 99th percentile are left out.
    """
    never = [one for one in records if one.exits == NEVER and (one.host_us is None or "p99" in one.host_us)]
    network, found = most_measured(never, tuple(LATENCY), "latency where no sample leaves early")
    by_classes = {}
    numbers = sorted({one.cell["classes"] for one in found})
    for classes in dict.fromkeys((numbers[0], numbers[-1])):
        of_classes = [one for one in found if one.cell["classes"] == classes]
        lines = {name: _latencies([one for one in of_classes if one.variant == name]) for name in LATENCY}
        by_classes[str(classes)] = {name: points for name, points in lines.items() if len(points) > 1}
    return {
        "title": _latency_title(by_classes, network.heads),
        "stamp": stamp(found, f"{network}. Lines: median of {rounds(found)}.", BANDS),
        "network": str(network),
        "classes": by_classes,
    }


def _latencies(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the points of a line by batch size: microseconds, and ratios to ``BARE`` of the same run."""
    points = []
    for one in sorted(records, key=lambda one: int(one.cell["batch"])):
        assert one.host_us is not None and one.device_us is not None
        host, device = known_percentiles(one.host_us), known_percentiles(one.device_us)
        point = {"batch": one.cell["batch"], "host_us": host, "device_us": device}
        bare = next((pair for pair in one.paired if (pair["role"], pair["variant"]) == ("bare", BARE)), None)
        if bare is not None:
            point["bare"] = {key: bare[key] for key in ("host_us", "host_ratio", "device_us", "device_ratio")}
        points.append(point)
    return points


def _latency_title(classes: Mapping[str, Any], heads: int) -> str:
    fewest = min(classes, key=int)

    def added(variant: str, unit: str) -> str | None:
        percent = [_percent(point, unit)["median"] for point in classes[fewest].get(variant, []) if "bare" in point]
        return f"{min(percent):.0f} to {max(percent):.0f} %" if percent else None

    device, plain = added(OURS, "device_us"), added(PLAIN, "device_us")
    if device is None:
        raise NoRecords(f"no record of {OURS} beside {BARE} at two batch sizes or more")
    ours = (
        f"{heads} overlapped heads of {fewest} classes add {device} of device time, {added(OURS, 'host_us')} of latency"
    )
    return f"{ours};\nplain heads in line add {plain} and {added(PLAIN, 'host_us')}" if plain else ours


def latency_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw latency above, and below what heads add to the graph without them."""
    figure = new_figure(8.0)
    rows = figure.add_gridspec(3, 2, height_ratios=(1.3, 0.5, 1))
    above = [figure.add_subplot(rows[0, 0])]
    above.append(figure.add_subplot(rows[0, 1], sharey=above[0]))
    below = [figure.add_subplot(rows[2, 0])]
    below.append(figure.add_subplot(rows[2, 1], sharey=below[0]))
    measured: set[int] = set()
    for axes, (classes, lines) in zip(above, numbers["classes"].items(), strict=False):
        for variant, points in lines.items():
            batches = [point["batch"] for point in points]
            measured.update(batches)
            line_with_band(axes, LATENCY[variant], batches, [point["host_us"] for point in points], ("median", "p99"))
        heading(axes, f"latency, {int(classes):,} classes a head")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_minor_locator(NullLocator())
    above[0].set_ylabel("host, call to answer, us")
    for axes, unit, name in zip(below, ("host_us", "device_us"), ("latency", "device time"), strict=True):
        for place, lines in enumerate(numbers["classes"].values()):
            for variant in ADDED:
                points = [point for point in lines.get(variant, []) if "bare" in point]
                if points:
                    line = LATENCY[variant]._replace(dashes="-" if place == 0 else ":")
                    batches = [point["batch"] for point in points]
                    line_with_band(axes, line, batches, [_percent(point, unit) for point in points], ("p20", "p80"))
        heading(axes, f"added by the heads: {name}")
        names = [f"{int(one):,} classes" for one in numbers["classes"]]
        key = "; ".join(f"{dashes}: {one}" for dashes, one in zip(("solid", "dotted"), names, strict=False))
        axes.text(0.98, 0.95, key, transform=axes.transAxes, ha="right", va="top", fontsize=8.5, color=GREY)
        axes.axhline(0, color="black", linewidth=1)
    below[0].set_ylabel("% over the same graph\nwithout heads")
    for axes in (*above, *below):
        tidy(axes, "both", xlabel="batch size, samples")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(measured), map(str, sorted(measured)))
    if len(numbers["classes"]) == 1:
        above[1].axis("off")
    legend_beside(figure.add_subplot(rows[1, :]), above[0], 2, handlelength=5.0)
    return frame(figure, numbers)


def _percent(point: Mapping[str, Any], unit: str) -> dict[str, float]:
    """Return percent over the median of ``BARE``; the median of these is the record's own ratio."""
    bare = point["bare"]
    percent = {name: 100 * (us / bare[unit] - 1) for name, us in point[unit].items()}
    return {**percent, "median": 100 * (bare[unit.replace("_us", "_ratio")] - 1)}


def time_to_answer_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return latency by batch size, variant and the exit at which all samples leave."""
    of_taps = [one for one in records if one.exits in one.cell["taps"]]
    network, early = most_measured(of_taps, (FLOOR, *SKIPPING), "samples that leave at a tap")
    fewest = min(one.cell["classes"] for one in early)
    early = [one for one in early if one.cell["classes"] == fewest]
    exits = [*early[0].cell["taps"], NEVER]  # in the order of the network
    cells = [one.cell for one in early]
    of_cells = [one for one in records if one.exits in exits and one.cell in cells]
    _, found = most_measured(of_cells, tuple(TO_ANSWER), "those networks")
    batches = {}
    for batch in sorted({cell["batch"] for cell in cells}):
        its = [one for one in found if one.cell["batch"] == batch]
        batches[str(batch)] = {name: _times(its, name, exits) for name in TO_ANSWER}
    shown = f"{network}, {fewest:,} classes. Medians; bars: 20th to 80th percentile of {rounds(found)}."
    return {
        "title": _time_to_answer_title(batches),
        "stamp": stamp(found, shown),
        "network": str(network),
        "exits": exits,
        "batches": batches,
    }


def _times(records: Sequence[Record], variant: str, exits: Sequence[str]) -> list[dict[str, Any]]:
    """Return the points of a line: microseconds on the host from the call until the answer is there."""
    us = {one.exits: known_percentiles(one.host_us or {}) for one in records if one.variant == variant}
    return [{"exit": name, "host_us": us[name]} for name in exits if name in us]


def _time_to_answer_title(batches: Mapping[str, Any]) -> str:
    """Tell the share of the whole network's time, and the distance to the floor, of answers at the first exit."""
    shares, above, longer, best = [], [], [], set()
    for lines in batches.values():
        times = {name: {point["exit"]: point["host_us"]["median"] for point in lines[name]} for name in lines}
        exits = [one for one in times[FLOOR] if one in times[BARE] and any(one in times[name] for name in SKIPPING)]
        if exits:
            first = exits[0]
            us, runner = min((times[name][first], name) for name in SKIPPING if first in times[name])
            shares.append(100 * us / times[BARE][first])
            above.append(us - times[FLOOR][first])
            if NEVER in times[runner] and NEVER in times[BARE]:
                longer.append(100 * times[runner][NEVER] / times[BARE][NEVER])
            best.add(runner.partition("@")[0])
    if not shares:
        skipping = ", ".join(SKIPPING)
        raise NoRecords(f"no record of {FLOOR}, {BARE} and one of {skipping} with samples that leave at a tap")
    who = " or ".join(sorted(best))
    return (
        f"Where all leave at {first}, {who} answers in {min(shares):.0f} to {max(shares):.0f} % of "
        f"the whole network's time,\n{min(above):.0f} to {max(above):.0f} us after a network that ends there"
        + (f"; where none leave, in up to {max(longer):.0f} %" if longer else "")
    )


def time_to_answer_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a panel a batch size, latency over the exit in each."""
    batches, exits = numbers["batches"], numbers["exits"]
    rows = -(-len(batches) // 2)
    figure = new_figure(1.9 + 2.6 * rows)
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=(*[1.0] * rows, 0.22))
    panels = [figure.add_subplot(grid[place // 2, place % 2]) for place in range(len(batches))]
    for axes, (batch, lines) in zip(panels, batches.items(), strict=True):
        for variant, points in lines.items():
            _line(axes, TO_ANSWER[variant], points, exits)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xticks(range(len(exits)), ["nowhere" if one == NEVER else one for one in exits])
        tidy(axes, title=f"batch {batch}", xlim=(-0.3, len(exits) - 0.7))
    for axes in panels[::2]:
        axes.set_ylabel("host, call to answer, us")
    for axes in panels[-2:]:
        axes.set_xlabel("exit at which all samples leave")
    legend_beside(figure.add_subplot(grid[rows, :]), panels[0], 3)
    return frame(figure, numbers)


def _line(axes: Axes, line: Line, points: Sequence[Mapping[str, Any]], exits: Sequence[str]) -> None:
    places = [exits.index(point["exit"]) for point in points]
    times = [point["host_us"] for point in points]
    down = [max(us["median"] - us["p20"], 0.0) for us in times]
    up = [max(us["p80"] - us["median"], 0.0) for us in times]
    medians = [us["median"] for us in times]
    axes.errorbar(places, medians, (down, up), **line.looks, markersize=5, linewidth=1.6, elinewidth=1)
