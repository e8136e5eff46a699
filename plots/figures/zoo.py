"""Figure "zoo": device time of what make_runner chooses by default over torch.compile's, by network and batch size."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from matplotlib.transforms import blended_transform_factory

from ...autotune.records.record import Record
from ...autotune.records.zoo import COMPILED, DEFAULT, GRAPH, MAX_AUTOTUNE, ZooCell, by_model, summary_of, zoo_cells
from ..records import NoRecords, rounds, stamp
from ..style import AMBER, BLUE, GREY, ORANGE, Line, frame, heading, legend_beside, new_figure, tidy

_FASTER = Line("make_runner, at least as fast", BLUE, "none", "o")
_SLOWER = Line("make_runner, slower", ORANGE, "none", "o")
#: What else is drawn over torch.compile's time, without heads.
_OTHERS = {
    GRAPH: Line("plain CUDA graph, no heads", GREY, "none", "D"),
    MAX_AUTOTUNE: Line("torch.compile max-autotune, no heads", AMBER, "none", "s"),
}
_NAMES = {DEFAULT: "make_runner", COMPILED: "torch.compile"}
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50)
#: Failures that are told in full; the others are counted.
_TOLD = 4


def zoo_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return ratios to torch.compile's time by network and batch, of the last run of each, and what is missing."""
    cells = zoo_cells(records)
    timed = [cell for cell in cells if cell.ratio() is not None]
    if not timed:
        raise NoRecords("no network whose default runner was timed beside torch.compile")
    ours = [cell.records[DEFAULT] for cell in timed]
    failed = [
        f"{_NAMES[variant]} of {cell.model} at batch {cell.batch} ({cell.records[variant].error})"
        for cell in cells
        for variant in _NAMES
        if variant in cell.records and cell.records[variant].error is not None
    ]
    told = [*failed[:_TOLD], *([f"{len(failed) - _TOLD} more"] if len(failed) > _TOLD else [])]
    where, taps = ours[0].environment, {len(one.cell["taps"]) for one in ours}
    heads = "heads" if len(taps) > 1 else f"{taps.pop()} heads"
    return {
        "title": _title(timed),
        "subtitle": (
            "Time of a call on the device. 1 is torch.compile (reduce-overhead) of the backbone without heads;\n"
            f"make_runner computes {heads} as well. {where.get('gpu')}, torch {where.get('torch')}, "
            f"Triton {where.get('triton')}"
        ),
        "stamp": stamp(
            ours,
            f"No image leaves; calls back to back, {rounds(ours)}, all variants in turns. Medians; "
            "thin lines: 20th percentile of ours over 80th of torch.compile's, and 80th over 20th.",
            *([f"Failed: {'; '.join(told)}."] if told else []),
        ),
        "batches": sorted({cell.batch for cell in cells}),
        "networks": {
            model: {str(batch): _point(cell) for batch, cell in its.items()} for model, its in by_model(cells).items()
        },
    }


def _title(timed: Sequence[ZooCell]) -> str:
    found, batches = summary_of(timed), {cell.batch for cell in timed}
    assert found is not None
    takes = f"{found.median:.2f} {'of' if found.median < 0.995 else 'times'} torch.compile's time"
    if found.cells == 1:
        return f"make_runner by default takes {takes} for {timed[0].model} at batch {timed[0].batch}"
    several = "networks and batches" if len(batches) > 1 else f"networks at batch {timed[0].batch}"
    return (
        f"make_runner by default takes {takes} in the median\n"
        f"of {found.cells} {several}, and is at least as fast in {found.as_fast} of them"
    )


def _point(cell: ZooCell) -> dict[str, Any]:
    """Return what is drawn of a cell; without a ratio the reason."""
    others = {name: ratio for name in _OTHERS if (ratio := cell.ratio(name)) is not None}
    ratio = cell.ratio()
    if ratio is None:
        missing = "no torch.compile" if cell.us(DEFAULT) else "failed" if DEFAULT in cell.records else "not measured"
        return {"ratio": None, "missing": missing, "others": others}
    ours, compiled = (cell.records[name].device_us or {} for name in (DEFAULT, COMPILED))
    ends = {"low": ours["p20"] / compiled["p80"], "high": ours["p80"] / compiled["p20"]}
    return {"ratio": ratio, **ends, "us": ours["median"], "others": others}


def zoo_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a row for each network, the lowest ratio first, and a panel for each batch size."""
    networks, batches = numbers["networks"], numbers["batches"]
    figure = new_figure(3.0 + 0.27 * len(networks))
    grid = figure.add_gridspec(3, 1, height_ratios=(0.3, 0.6 + 0.27 * len(networks), 0.25))
    above, below = (figure.add_subplot(grid[row]) for row in (0, 2))
    panels = grid[1].subgridspec(1, len(batches)).subplots(sharex=True, sharey=True, squeeze=False)[0]
    low, high = _range(networks)
    for batch, axes in zip(batches, panels, strict=True):
        axes.axvspan(1.0, high, color=ORANGE, alpha=0.08, linewidth=0)
        axes.axvline(1.0, color="black", linewidth=1.2)
        for place, its in enumerate(networks.values()):
            _draw(axes, place, its.get(str(batch), {"ratio": None, "missing": "not measured", "others": {}}))
        for text, side in (("faster ", "right"), (" slower", "left")):
            axes.text(1.0, -0.85, text, ha=side, va="center", fontsize=7.5, color=GREY)
        heading(axes, f"batch {batch}")
        tidy(axes, "x", xscale="log", xlim=(low, high), ylim=(len(networks) - 0.4, -1.3))
        axes.xaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(networks)), networks)
    points = [one for its in networks.values() for one in its.values()]
    drawn = {name for one in points for name in one["others"]}
    shown = [line for name, line in _OTHERS.items() if name in drawn]
    for line in (_FASTER, _SLOWER, *shown):  # in the legend alone
        panels[0].plot([], [], **line.looks, markerfacecolor=line.colour if line.marker == "o" else "none")
    legend_beside(below, panels[0], 4, fontsize=8, handletextpad=0.2, columnspacing=1.2)
    above.axis("off")
    left = blended_transform_factory(figure.transFigure, above.transAxes)
    above.text(0.01, 1.0, numbers["subtitle"], va="top", fontsize=9, transform=left).set_in_layout(False)
    return frame(figure, numbers)


def _range(networks: Mapping[str, Mapping[str, Any]]) -> tuple[float, float]:
    """Return the ends of the axis of ratios."""
    points = [one for its in networks.values() for one in its.values()]
    drawn = [value for one in points for value in (*one["others"].values(), one.get("low"), one.get("high")) if value]
    return min(0.5, *drawn) / 1.1, max(1.5, *drawn) * 1.1


def _draw(axes: Axes, place: int, point: Mapping[str, Any]) -> None:
    """Draw a network of one batch size, its ratio in digits at the right, or what is missing."""
    ratio = point["ratio"]
    for name, value in point["others"].items():
        axes.plot([value], [place], **{**_OTHERS[name].looks, "label": None}, markersize=5, markerfacecolor="none")
    if ratio is None:
        axes.text(0.02, place, point["missing"], transform=axes.get_yaxis_transform(), va="center", fontsize=7.5,
                  style="italic", color=GREY)  # fmt: skip
        return
    line = _FASTER if ratio <= 1.0 else _SLOWER
    axes.barh(place, ratio - 1.0, 0.5, 1.0, color=line.colour, alpha=0.35, linewidth=0)
    axes.plot([point["low"], point["high"]], [place, place], color=line.colour, linewidth=0.9)
    axes.plot([ratio], [place], marker="o", color=line.colour, markersize=6)
    axes.text(1.02, place, f"{ratio:.2f}", transform=axes.get_yaxis_transform(), va="center", fontsize=8,
              color=line.colour)  # fmt: skip
