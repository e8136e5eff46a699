"""The figure "anytime", of ``auxhead calibrate --curve``: accuracy against mean work, and time, on the test split."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..style import AMBER, BLUE, GREY, frame, new_figure, note, tidy
from .reports import read as read

#: What is drawn of the points of each way to thresholds: its label, and its looks.
_LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "path": ("thresholds by error rate (calibrate)", {"color": BLUE, "linestyle": "-", "linewidth": 2}),
    "budgeted": ("thresholds by share (MSDNet)", {"color": AMBER, "marker": ".", "linewidth": 1}),
}


def anytime_numbers(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return each curve as points of work, time and accuracy; in percent and milliseconds."""
    exits, samples, machine = report["exits"], report["samples"], report["environment"]
    latencies = report["latencies"]
    full, half = exits[-1], min(report["alone"]["path"], key=lambda one: abs(one["work"] - 0.5))
    low, high = (100 * end for end in half["interval"])
    cut = max((one for one in exits if one["work"] <= half["work"]), key=lambda one: one["accuracy"], default=half)
    beaten = cut is not half and cut["accuracy"] >= half["accuracy"]
    return {
        "title": (
            f"{100 * half['work']:.0f} % of the work gets {100 * half['accuracy']:.1f} % right "
            f"({low:.1f} to {high:.1f}), all of it {100 * full['accuracy']:.1f} %"
            + (f";\ncut off at {cut['name']} it gets {100 * cut['accuracy']:.1f} %" if beaten else "")
        ),
        "curves": {name: [_point(one, report["flops"]) for one in points] for name, points in report["alone"].items()},
        "exits": [{"name": one["name"], **_point(one, report["flops"])} for one in exits],
        "half": {"percent": 100 * half["work"], **_point(half, report["flops"])},
        "units": {
            "work": "% of the backbone's operators" if report["flops"] is None else "million FLOPs a sample, mean",
            "latency_ms": None if latencies is None else f"ms to the answer, batch {latencies['batch_size']}",
        },
        "stamp": (
            f"{report['data'] or 'data without a name'}; samples for temperatures {samples['temperature']:,} and "
            f"thresholds {samples['thresholds']:,}, test {samples['test']:,} (shown); band: "
            f"{100 * report['confidence']:g} % for each point by itself"
            + ("" if report["unknown"] is None else "; it may have learned from these samples")
            + "\n"
            f"{machine['device']}, Python {machine['python']}, torch {machine['torch']}, auxhead {machine['auxhead']}"
            + ("" if latencies is None else f"; {latencies['runner']} on {latencies['device']}")
        ),
    }


def _point(row: Mapping[str, Any], flops: float | None) -> dict[str, Any]:
    """Return a row's work, million FLOPs or percent, its time and accuracy, and the interval of that if it is shown."""
    point = {
        "work": 100 * row["work"] if flops is None else row["work"] * flops / 1e6,
        "latency_ms": row["latency_ms"],
        "accuracy_percent": 100 * row["accuracy"],
    }
    return point | ({"interval_percent": [100 * end for end in row["interval"]]} if "thresholds" in row else {})


def anytime_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw accuracy against work and, where it was measured, beside it against time."""
    shown = [unit for unit, label in numbers["units"].items() if label is not None]
    figure = new_figure(4.6)
    panels: Sequence[Axes] = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, unit in zip(panels, shown, strict=True):
        _panel(axes, numbers, unit)
    panels[0].set_ylabel("right, %")
    panels[0].legend(frameon=False, fontsize=8, loc="lower right")
    return frame(figure, numbers)


def _panel(axes: Axes, numbers: Mapping[str, Any], unit: str) -> None:
    exits, path, half = numbers["exits"], numbers["curves"]["path"], numbers["half"]
    full = exits[-1]["accuracy_percent"]
    low, high = zip(*(one["interval_percent"] for one in path), strict=True)
    axes.fill_between([one[unit] for one in path], low, high, color=BLUE, alpha=0.15, linewidth=0)
    axes.axhline(full, color="black", linewidth=1)
    for name, points in numbers["curves"].items():
        label, looks = _LINES[name]
        axes.plot([one[unit] for one in points], [one["accuracy_percent"] for one in points], label=label, **looks)
    axes.plot(
        [one[unit] for one in exits], [one["accuracy_percent"] for one in exits], "o:", color=GREY,
        markerfacecolor="white", linewidth=1, label="network cut off at an exit",
    )  # fmt: skip
    axes.plot(half[unit], half["accuracy_percent"], "o", color=BLUE, markersize=8)
    if unit == "work":
        at = half[unit], half["accuracy_percent"]
        note(axes, f"{half['percent']:.0f} % of the work: {at[1]:.1f} %", at, (6, -16), fontsize=9, color=BLUE)
    note(axes, "full network", (axes.get_xlim()[0], full), (4, 3), fontsize=8)
    tidy(axes, "both", xlabel=numbers["units"][unit])
