"""Figure "time-to-answer": latency by the exit at which all samples leave, between a floor and the whole network."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ...autotune.records.record import Record
from ..records import NEVER, NoRecords, most_measured, percentiles, rounds, stamp
from ..style import BLUE, GREEN, GREY, ORANGE, Line, frame, legend_beside, new_figure, tidy

FLOOR, BARE = "truncated@cudnn", "graph-bare@cudnn"
LINES = {
    BARE: Line("whole network, no heads", GREY, ":", ""),
    "overlapped@cudnn": Line("`overlapped`: skips nothing", BLUE, "-", "D"),
    "polled@cudnn": Line("`polled`: the host stops", ORANGE, "-", "s"),
    "gated@cudnn": Line("`gated`: the GPU stops", GREEN, "-", "^"),
    FLOOR: Line("floor: network cut off there", "black", "-", "o"),
}
#: Variants that skip work; the title names the best of them.
SKIPPING = ("gated@cudnn", "polled@cudnn")


def draw(records: Sequence[Record]) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it."""
    of_taps = [one for one in records if one.exits in one.cell["taps"]]
    network, early = most_measured(of_taps, (FLOOR, *SKIPPING), "samples that leave at a tap")
    fewest = min(one.cell["classes"] for one in early)
    early = [one for one in early if one.cell["classes"] == fewest]
    exits = [*early[0].cell["taps"], NEVER]  # in the order of the network
    cells = [one.cell for one in early]
    of_cells = [one for one in records if one.exits in exits and one.cell in cells]
    _, found = most_measured(of_cells, tuple(LINES), "those networks")
    batches = {}
    for batch in sorted({cell["batch"] for cell in cells}):
        its = [one for one in found if one.cell["batch"] == batch]
        batches[str(batch)] = {name: _points(its, name, exits) for name in LINES}
    shown = f"{network}, {fewest:,} classes. Medians; bars: 20th to 80th percentile of {rounds(found)}."
    drawn = {
        "title": _title(batches),
        "stamp": stamp(found, shown),
        "network": str(network),
        "exits": exits,
        "batches": batches,
    }
    return _figure(drawn), drawn


def _points(records: Sequence[Record], variant: str, exits: Sequence[str]) -> list[dict[str, Any]]:
    """Return the points of a line: microseconds on the host from the call until the answer is there."""
    by_exit = {one.exits: one for one in records if one.variant == variant}
    return [{"exit": name, "host_us": percentiles(by_exit[name].host_us or {})} for name in exits if name in by_exit]


def _title(batches: Mapping[str, Any]) -> str:
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


def _figure(drawn: Mapping[str, Any]) -> Figure:
    batches, exits = drawn["batches"], drawn["exits"]
    rows = -(-len(batches) // 2)
    figure = new_figure(1.9 + 2.6 * rows)
    grid = figure.add_gridspec(rows + 1, 2, height_ratios=(*[1.0] * rows, 0.22))
    panels = [figure.add_subplot(grid[place // 2, place % 2]) for place in range(len(batches))]
    for axes, (batch, lines) in zip(panels, batches.items(), strict=True):
        for variant, points in lines.items():
            _line(axes, LINES[variant], points, exits)
        axes.set_title(f"batch {batch}", fontsize=10, loc="left")
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.set_xlim(-0.3, len(exits) - 0.7)
        axes.set_xticks(range(len(exits)), ["nowhere" if one == NEVER else one for one in exits])
        tidy(axes)
    for axes in panels[::2]:
        axes.set_ylabel("host, call to answer, us")
    for axes in panels[-2:]:
        axes.set_xlabel("exit at which all samples leave")
    legend_beside(figure.add_subplot(grid[rows, :]), panels[0], 3)
    return frame(figure, drawn)


def _line(axes: Axes, line: Line, points: Sequence[Mapping[str, Any]], exits: Sequence[str]) -> None:
    places = [exits.index(point["exit"]) for point in points]
    times = [point["host_us"] for point in points]
    down = [max(us["median"] - us["p20"], 0.0) for us in times]
    up = [max(us["p80"] - us["median"], 0.0) for us in times]
    medians = [us["median"] for us in times]
    axes.errorbar(places, medians, (down, up), **line.looks, markersize=5, linewidth=1.6, elinewidth=1)
