"""Figure "profile": launches, kernels, CUDA API time and latency of one request, before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from ...autotune.records.record import Record
from ..records import NoRecords, stamp
from ..style import AMBER, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, frame, heading, new_figure, note, tidy

#: Colours of the CUDA functions that take most time; all others are one part.
_COLOURS = (ORANGE, SKY, GREEN, PURPLE, AMBER)


def profile_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return launches, kernels, API time and latency of a request before and after, of the last run."""
    run = [record for record in records if record.run == records[-1].run and record.error is None]
    before = next((record for record in run if not record.paired), None)
    after = next((record for record in run if record.paired), None)
    if before is None or after is None:
        raise NoRecords("the last profile lacks what was before or what was after")
    sides = {"before": before, "after": after}
    measured = {name: record.measured or {} for name, record in sides.items()}
    host = {name: record.host_us or {} for name, record in sides.items()}
    times = host["before"]["median"] / host["after"]["median"]
    launches = [f"{measured[name]['launches']:,.0f}" for name in sides]
    faster = f"{times:.1f} times sooner" if times > 1.0 else f"{1 / times:.1f} times later"
    cell = after.cell
    size = "x".join(map(str, cell["input"]))
    requests = after.protocol["requests"]
    return {
        "title": f"{launches[0]} launches of a request become {launches[1]}, and the answer is there {faster}",
        "sides": {"before": "eager, plain\nheads, .item()", "after": after.variant.replace("@", ",\ntrunk ")},
        "launches": {name: one["launches"] for name, one in measured.items()},
        "kernels": {name: one["kernels"] for name, one in measured.items()},
        "api_us": _parts({name: one["api"] for name, one in measured.items()}),
        "answer_us": {name: {key: one[key] for key in ("median", "p20", "p80")} for name, one in host.items()},
        "stamp": stamp(
            [before, after],
            f"{cell['model']}, {cell['dtype']}, batch {cell['batch']}, input {size}, {len(cell['taps'])} heads of "
            f"{cell['classes']} classes; {requests} requests, each from an idle device",
            "launches, kernels and API time: means under torch.profiler, which adds to the API's time",
            "time to the answer: median, line from 20th to 80th percentile, without a profiler, taking turns",
        ),
    }


def _parts(api: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the host's microseconds in CUDA functions by side; the functions that take least are one part."""
    totals: dict[str, float] = {}
    for rows in api.values():
        for row in rows:
            totals[row["name"]] = totals.get(row["name"], 0.0) + row["host_us"]
    first = sorted(totals, key=lambda name: (-totals[name], name))[: len(_COLOURS)]
    parts = {}
    for side, rows in api.items():
        parts[side] = {name: sum(row["host_us"] for row in rows if row["name"] == name) for name in first}
        parts[side]["all others"] = sum(row["host_us"] for row in rows if row["name"] not in first)
    return parts


def profile_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a panel for each of the four, a bar before and one after."""
    figure = new_figure(4.8)
    (launches, answer), (kernels, api) = figure.subplots(2, 2, width_ratios=(1, 1.6))
    _bars(launches, numbers["launches"], "launches by the host, calls (profiler)")
    _bars(kernels, numbers["kernels"], "kernels that ran (profiler)")
    medians = {side: us["median"] for side, us in numbers["answer_us"].items()}
    ends = [us["p80"] for us in numbers["answer_us"].values()]
    _bars(answer, medians, "host, until the answer is there, us (no profiler)", ends)
    for place, us in enumerate(numbers["answer_us"].values()):
        answer.plot([us["p20"], us["p80"]], [place, place], color="black", linewidth=1.5)
    _api(api, numbers["api_us"])
    for axes in (launches, kernels, answer, api):
        axes.set_ylim(1.6, -0.6)  # before above after
        axes.set_yticks([0, 1], list(numbers["sides"]))
        tidy(axes, "x")
    for axes in (launches, kernels):
        axes.set_yticklabels([f"{side}:\n{what}" for side, what in numbers["sides"].items()], fontsize=9)
    return frame(figure, numbers)


def _bars(axes: Axes, values: Mapping[str, float], title: str, ends: Sequence[float] | None = None) -> None:
    """Draw a bar for each side, with its number behind it or behind ``ends``."""
    own = list(values.values())
    axes.barh([0, 1], own, color=[ORANGE, BLUE], height=0.6)
    _numbers(axes, own, ends or own)
    heading(axes, title)


def _numbers(axes: Axes, values: Sequence[float], ends: Sequence[float]) -> None:
    for place, (value, end) in enumerate(zip(values, ends, strict=True)):
        text = f"{value:,.0f}" if value == round(value) or value >= 10 else f"{value:,.1f}"
        # behind the line of percentiles it would seem to be the number of that
        at, colour = (0, "white") if end > value > 0.3 * max(ends) else (end, "black")
        note(axes, text, (at, place), (6, 0), va="center", fontsize=9, color=colour)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_xlim(0, 1.2 * max(ends))


def _api(axes: Axes, parts: Mapping[str, Mapping[str, float]]) -> None:
    left = dict.fromkeys(parts, 0.0)
    for name, color in zip(next(iter(parts.values())), (*_COLOURS, GREY), strict=False):
        own = [parts[side][name] for side in parts]
        axes.barh([0, 1], own, left=list(left.values()), color=color, height=0.6, label=name)
        left = {side: left[side] + parts[side][name] for side in parts}
    _numbers(axes, list(left.values()), list(left.values()))
    heading(axes, "host in CUDA API calls, us (profiler)")
    axes.legend(frameon=False, fontsize=8, loc="lower right", ncols=2, columnspacing=1.0, handlelength=1.2)
