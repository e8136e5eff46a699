"""Figure "footprint": time that heads add to the trunk against the share of the SMs' warps that they take."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ...autotune.records.record import Record, latest
from ..records import NoRecords, network_of, rounds, stamp
from ..style import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Line,
    frame,
    heading,
    legend_beside,
    new_figure,
    note,
    tidy,
)  # fmt: skip

#: Numbers of footprints, as drawn.
Points = Sequence[Mapping[str, Any]]
#: Percent of the trunk's time from which on heads are not free; captures of one and the same thing differ by as much.
FREE_PERCENT = 2.0
#: Footprints that cost something for other reasons than their share of the SMs: heads on few SMs end late.
_APART = ("priority", "SMs")
#: Most panels side by side.
_PANELS = 3
#: Hiding efficiencies below this, percent, are drawn at the lower edge.
_LEAST_HIDDEN = -100.0
#: Additions to the trunk's time above this, percent, are drawn at the upper edge.
_MOST_ADDED = 12.0
#: Changes to the rule's launch, named within a footprint's name, those of the trunk's conditions last; and their looks.
KINDS = {
    "programs": Line("programs, /4 to x8", BLUE, "-", "o"),
    "warps": Line("warps a program", AMBER, "", "^"),
    "registers": Line("cap of registers", GREEN, "", "s"),
    "SMs": Line("cap of SMs", PURPLE, "", "D"),
    "priority": Line("trunk without priority", ORANGE, "", "X"),
    "by rule": Line("by rule", "black", "", "*"),
}


def footprint_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return what footprints add and hide by batch size, of the network with the most of them; in percent."""
    found = [one for one in latest(records) if one.error is None]
    if not found:
        raise NoRecords("no footprint that was measured")
    (((network, classes), _),) = Counter(map(_network, found)).most_common(1)
    found = [one for one in found if _network(one) == (network, classes)]
    batches: dict[str, dict[str, Any]] = {}
    for batch in sorted({one.cell["batch"] for one in found})[:_PANELS]:
        points = [_point(one) for one in found if one.cell["batch"] == batch]
        points.sort(key=lambda one: one["occupancy_percent"])
        batches[str(batch)] = {"points": points, "boundary": boundary(points)}
    return {
        "title": "\n".join(_finding(batch, **one) for batch, one in batches.items()),
        "stamp": stamp(
            found,
            f"{network}, {classes:,} classes; {rounds(found)}.",
            f"Free: the bar of stretch begins below {FREE_PERCENT:.0f} %. Dashed: the best boundary, if one helps; "
            "those without priority and on few SMs left out.",
            "Residency tier: warps of head programs by the time that each program records in the kernel, of all that "
            "the SMs hold while the bare trunk runs.",
            "Hiding efficiency: (trunk + heads alone - both) / the shorter of both. Bars: 99 % interval of stretch, "
            "20th to 80th percentile of the rest.",
        ),
        "network": str(network),
        "classes": classes,
        "batches": batches,
    }


def _network(record: Record) -> tuple[Any, int]:
    return network_of(record), int(record.cell["classes"])


def _point(record: Record) -> dict[str, Any]:
    """Return the drawn numbers of one footprint, in percent."""
    details = record.measured or {}
    trunk = next(pair for pair in record.paired if pair["role"] == "trunk")
    return {
        "footprint": record.variant,
        "kind": next(kind for kind in reversed(KINDS) if kind in record.variant),
        "programs": details["programs"],
        **_in_percent("occupancy", details["occupancy"]["residency"]["warps_share"]),
        "added_percent": 100 * (trunk["device_ratio"] - 1),
        "added_low": 100 * (trunk["low"] - 1),
        "added_high": 100 * (trunk["high"] - 1),
        **_in_percent("hidden", details["hiding_efficiency"]),
    }


def _in_percent(name: str, shares: Mapping[str, float]) -> dict[str, float]:
    ends = {f"{name}_{end}": 100 * shares[end] for end in ("p20", "p80")}
    return {f"{name}_percent": 100 * shares["median"], **ends}


def boundary(points: Points) -> dict[str, Any] | None:
    """Return the occupancy that separates free footprints from others with the fewest on the wrong side.

    Footprints without the trunk's priority and on few SMs are left out. None if all are free, or none is, if more than
    a quarter would be on the wrong side, or if it separates them no better than taking all for free, or none.
    """
    known = sorted((one["occupancy_percent"], _free(one)) for one in points if one["kind"] not in _APART)
    all_free, none_free = sum(not free for _, free in known), sum(free for _, free in known)  # that would be wrong
    if not (all_free and none_free):
        return None
    wrong = [
        sum(not free for _, free in known[:split]) + sum(free for _, free in known[split:])
        for split in range(1, len(known))
    ]
    best = wrong.index(min(wrong))
    if 4 * wrong[best] > len(known) or wrong[best] >= min(all_free, none_free):
        return None
    (below, _), (above, _) = known[best : best + 2]
    return {"occupancy_percent": math.sqrt(below * above), "footprints": len(known), "on_the_wrong_side": wrong[best]}


def _free(point: Mapping[str, Any]) -> bool:
    """Return whether the footprint's cost may lie below ``FREE_PERCENT``."""
    return bool(point["added_low"] < FREE_PERCENT)


def _finding(batch: str, points: Points, boundary: Mapping[str, Any] | None) -> str:
    usual = [one for one in points if one["kind"] not in _APART]
    if not usual:
        raise NoRecords(f"no footprint at batch {batch} but those under other conditions")
    added = [one["added_percent"] for one in usual]
    if boundary is not None:
        up_to = boundary["occupancy_percent"]
        few = statistics.median(one["added_percent"] for one in usual if one["occupancy_percent"] <= up_to)
        most = max(one["added_percent"] for one in usual if one["occupancy_percent"] >= up_to)
        free = f"heads add {round(few)} % up to {up_to:.2g} % of the SMs' warps"
        return f"Batch {batch}: {free}; beyond, up to {most:.0f} %"
    most = max(one["occupancy_percent"] for one in usual)
    if all(map(_free, usual)):
        few = statistics.median(added)
        return f"Batch {batch}: heads add {round(few)} % up to {most:.2g} % of the SMs' warps, the most that was tried"
    if not any(map(_free, usual)):
        return f"Batch {batch}: no footprint is free; they add {min(added):.0f} to {max(added):.0f} % to the trunk"
    return f"Batch {batch}: occupancy does not tell what is free; {min(added):+.1f} to {max(added):+.1f} %"


def footprint_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw what is added above and what is hidden below, over the share of the warps, a column a batch size."""
    figure = new_figure(6.6)
    rows = figure.add_gridspec(3, 1, height_ratios=(1.2, 1, 0.1))
    grid = rows[:2].subgridspec(2, len(numbers["batches"]), height_ratios=(1.2, 1))
    panels = grid.subplots(sharex="col", sharey="row", squeeze=False)
    for (batch, found), (above, below) in zip(numbers["batches"].items(), zip(*panels, strict=True), strict=True):
        for kind, line in KINDS.items():
            points = [one for one in found["points"] if one["kind"] == kind]
            _scatter(above, line, points, "added", ("added_low", "added_high"), (-math.inf, _MOST_ADDED))
            _scatter(below, line, points, "hidden", ("hidden_p20", "hidden_p80"), (_LEAST_HIDDEN, math.inf))
        heading(above, f"batch {batch}")
        above.axhspan(-FREE_PERCENT, FREE_PERCENT, color=GREY, alpha=0.12, linewidth=0)
        below.axhline(100, color="black", linewidth=1)
        for axes in (above, below):
            axes.axhline(0, color="black", linewidth=1)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            tidy(axes, "both")
            if found["boundary"] is not None:
                axes.axvline(found["boundary"]["occupancy_percent"], color=GREY, linestyle="--", linewidth=1.2)
        below.set_xlabel("SM occupancy by heads, % of all warps\n(residency tier, in the trunk's time)")
    panels[0][0].set_ylabel(f"stretch: % added to the\ntrunk's time (grey: < {FREE_PERCENT:.0f} %)")
    panels[1][0].set_ylabel("hiding efficiency, %")
    legend_beside(figure.add_subplot(rows[2]), panels[0][0], 6, fontsize=8, columnspacing=1.2)
    return frame(figure, numbers)


def _scatter(
    axes: Axes, line: Line, points: Points, name: str, ends: tuple[str, str], shown: tuple[float, float]
) -> None:
    """Draw points of one kind with bars; those beyond the ends of ``shown`` are drawn there, with their number."""

    def within(percent: float) -> float:
        return min(max(percent, shown[0]), shown[1])

    x = [one["occupancy_percent"] for one in points]
    y = [within(one[f"{name}_percent"]) for one in points]
    size = 11 if line.marker == "*" else 6
    axes.plot(x, y, **line.looks, markersize=size, linewidth=1.2, zorder=3)
    for one, at in zip(points, y, strict=True):
        low, high = (within(one[end]) for end in ends)
        axes.plot([one["occupancy_percent"]] * 2, [low, high], color=line.colour, linewidth=1, alpha=0.7)
        axes.plot([one["occupancy_p20"], one["occupancy_p80"]], [at, at], color=line.colour, linewidth=1, alpha=0.7)
        if one[f"{name}_percent"] != at:
            text = f"{one[f'{name}_percent']:+.0f}"
            offset, va = (-6, "top") if at == shown[1] else (6, "bottom")
            point = one["occupancy_percent"], at
            note(axes, text, point, (0, offset), ha="center", va=va, fontsize=7.5, color=line.colour)
