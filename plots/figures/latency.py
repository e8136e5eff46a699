"""Figure "latency": latency by batch size of the runner and its baselines, and time that heads add to a graph."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from ...autotune.records.record import Record
from ..records import NEVER, NoRecords, most_measured, percentiles, rounds, stamp
from ..style import AMBER, BLUE, GREY, ORANGE, SKY, Line, frame, legend_beside, new_figure, tidy

#: The variants drawn; colours tell the heads, dashes the way to run.
LINES = {
    "eager-naive-item@as_is": Line("plain heads, eager, .item() after each", ORANGE, ":", "s"),
    "eager-bare@as_is": Line("no heads, eager", GREY, ":", "o"),
    "compile-naive-reduce-overhead@as_is": Line("plain heads, torch.compile", ORANGE, "--", "s"),
    "compile-bare-reduce-overhead@as_is": Line("no heads, torch.compile", GREY, "--", "o"),
    "graph-bare@as_is": Line("no heads, CUDA graph", GREY, "-.", "o"),
    "graph-naive@cudnn": Line("plain heads in line, graph of fused conv.", ORANGE, "-", "s"),
    "graph-naive-forked@cudnn": Line("plain heads on a side stream, same graph", AMBER, "-", "^"),
    "graph-fused@cudnn": Line("fused heads in line, same graph", SKY, "-", "v"),
    "overlapped@cudnn": Line("fused heads, `overlapped`", BLUE, "-", "D"),
    "graph-bare@cudnn": Line("no heads, graph of fused conv.", "black", "-", "o"),
}
BARE, OURS, PLAIN = "graph-bare@cudnn", "overlapped@cudnn", "graph-naive@cudnn"
#: Variants in the lower panels, which differ from ``BARE`` by their heads alone.
ADDED = ("graph-naive@cudnn", "graph-naive-forked@cudnn", "graph-fused@cudnn", OURS)
BANDS = "Bands: latency from the median to the 99th percentile of requests; what is added, 20th to 80th."


def draw(records: Sequence[Record]) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it.

    Records without the 99th percentile are not drawn.
    """
    never = [one for one in records if one.exits == NEVER and (one.host_us is None or "p99" in one.host_us)]
    network, found = most_measured(never, tuple(LINES), "latency where no sample leaves early")
    by_classes = {}
    numbers = sorted({one.cell["classes"] for one in found})
    for classes in dict.fromkeys((numbers[0], numbers[-1])):
        of_classes = [one for one in found if one.cell["classes"] == classes]
        lines = {name: _points([one for one in of_classes if one.variant == name]) for name in LINES}
        by_classes[str(classes)] = {name: points for name, points in lines.items() if len(points) > 1}
    drawn = {
        "title": _title(by_classes, network.heads),
        "stamp": stamp(found, f"{network}. Lines: median of {rounds(found)}.", BANDS),
        "network": str(network),
        "classes": by_classes,
    }
    return _figure(drawn), drawn


def _points(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the points of a line by batch size: microseconds, and ratios to ``BARE`` of the same run."""
    points = []
    for one in sorted(records, key=lambda one: int(one.cell["batch"])):
        assert one.host_us is not None and one.device_us is not None
        host, device = percentiles(one.host_us), percentiles(one.device_us)
        point = {"batch": one.cell["batch"], "host_us": host, "device_us": device}
        bare = next((pair for pair in one.paired if (pair["role"], pair["variant"]) == ("bare", BARE)), None)
        if bare is not None:
            point["bare"] = {key: bare[key] for key in ("host_us", "host_ratio", "device_us", "device_ratio")}
        points.append(point)
    return points


def _title(classes: Mapping[str, Any], heads: int) -> str:
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


def _figure(drawn: Mapping[str, Any]) -> Figure:
    figure = new_figure(8.0)
    rows = figure.add_gridspec(3, 2, height_ratios=(1.3, 0.5, 1))
    above = [figure.add_subplot(rows[0, 0])]
    above.append(figure.add_subplot(rows[0, 1], sharey=above[0]))
    below = [figure.add_subplot(rows[2, 0])]
    below.append(figure.add_subplot(rows[2, 1], sharey=below[0]))
    measured: set[int] = set()
    for axes, (classes, lines) in zip(above, drawn["classes"].items(), strict=False):
        for variant, points in lines.items():
            batches = [point["batch"] for point in points]
            measured.update(batches)
            _line(axes, LINES[variant], batches, [point["host_us"] for point in points], ("median", "p99"))
        axes.set_title(f"latency, {int(classes):,} classes a head", fontsize=10, loc="left")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_minor_locator(NullLocator())
    above[0].set_ylabel("host, call to answer, us")
    for axes, unit, name in zip(below, ("host_us", "device_us"), ("latency", "device time"), strict=True):
        for place, lines in enumerate(drawn["classes"].values()):
            for variant in ADDED:
                points = [point for point in lines.get(variant, []) if "bare" in point]
                if points:
                    line = LINES[variant]._replace(dashes="-" if place == 0 else ":")
                    batches = [point["batch"] for point in points]
                    _line(axes, line, batches, [_percent(point, unit) for point in points], ("p20", "p80"))
        axes.set_title(f"added by the heads: {name}", fontsize=10, loc="left")
        names = [f"{int(one):,} classes" for one in drawn["classes"]]
        key = "; ".join(f"{dashes}: {one}" for dashes, one in zip(("solid", "dotted"), names, strict=False))
        axes.text(0.98, 0.95, key, transform=axes.transAxes, ha="right", va="top", fontsize=8.5, color=GREY)
        axes.axhline(0, color="black", linewidth=1)
    below[0].set_ylabel("% over the same graph\nwithout heads")
    for axes in (*above, *below):
        tidy(axes, "both")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(measured), map(str, sorted(measured)))
        axes.set_xlabel("batch size, samples")
    if len(drawn["classes"]) == 1:
        above[1].axis("off")
    legend_beside(figure.add_subplot(rows[1, :]), above[0], 2, handlelength=5.0)
    return frame(figure, drawn)


def _line(
    axes: Axes, line: Line, batches: Sequence[int], values: Sequence[Mapping[str, float]], band: tuple[str, str]
) -> None:
    axes.plot(batches, [value["median"] for value in values], **line.looks, markersize=4.5, linewidth=1.6)
    low, high = ([value[end] for value in values] for end in band)
    axes.fill_between(batches, low, high, color=line.colour, alpha=0.25, linewidth=0)


def _percent(point: Mapping[str, Any], unit: str) -> dict[str, float]:
    """Return percent over the median of ``BARE``; the median of these is the record's own ratio."""
    bare = point["bare"]
    percent = {name: 100 * (us / bare[unit] - 1) for name, us in point[unit].items()}
    return {**percent, "median": 100 * (bare[unit.replace("_us", "_ratio")] - 1)}
