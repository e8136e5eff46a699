"""Figure "pareto": accuracy against mean time to the answer, for each runner under several sets of thresholds."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from ...autotune.records.record import Record
from ..records import NoRecords, stamp
from ..style import BLUE, GREEN, GREY, ORANGE, PALE, Line, frame, legend_beside, new_figure, note, row_of_panels, tidy

#: Percentage points of accuracy that the title allows.
LOSS = 0.5
#: Variants by what stands before "@" in their names.
LINES = {
    "graph-bare": Line("full network, one CUDA graph", "black", "", "D"),
    "overlapped": Line("overlapped", BLUE, "-", "o"),
    "polled": Line("polled", GREEN, "-", "^"),
    "gated": Line("gated", ORANGE, "-", "v"),
}
#: The network without heads; eagerly it takes so long that only the small print tells its time.
EAGER, GRAPH = "eager-bare", "graph-bare"
#: Points are drawn down to this many percentage points below the full network's accuracy.
_SHOWN = 2.0
#: Points of equal accuracy share a label if their times differ by less, as a share.
_TOO_CLOSE = 0.03


def pareto_numbers(records: Sequence[Record]) -> dict[str, Any]:
    """Return accuracy and time by runner and thresholds: of the last network, and of each batch size the last run."""
    weights = records[-1].protocol.get("weights")
    runs: dict[str, list[Record]] = {}
    for record in records:
        if record.protocol.get("weights") == weights:
            run = runs.setdefault(json.dumps(record.cell, sort_keys=True), [])
            run[:] = [*(one for one in run if one.run == record.run), record]
    panels = sorted((_panel(run) for run in runs.values()), key=lambda panel: panel["batch"])
    panels = [panel for panel in panels if panel["runners"] and GRAPH in panel["full"]]
    if not panels:
        raise NoRecords("no measurement of the full network in a CUDA graph and of a runner beside it")
    used = [record for run in runs.values() for record in run]
    return {"title": _title(panels), "panels": panels, "stamp": _stamp(used, panels)}


def _panel(records: Sequence[Record]) -> dict[str, Any]:
    """Return the drawn numbers of one batch size; times in microseconds, accuracies in percent."""
    runners: dict[str, dict[str, list[Any]]] = {}
    full: dict[str, dict[str, float]] = {}
    for record in records:
        name = record.variant.partition("@")[0]
        if record.measured is None or name not in (EAGER, *LINES):
            continue
        us, accuracy = record.measured["mean_host_us"], 100 * record.measured["accuracy"]
        if name in (EAGER, GRAPH):  # measured with each set of thresholds, none of which it uses: the first counts
            full.setdefault(name, {"mean_us": us, "accuracy_percent": accuracy})
            continue
        series = runners.setdefault(name, {"thresholds": [], "mean_us": [], "accuracy_percent": [], "over_bare": []})
        series["thresholds"].append(record.exits)
        series["mean_us"].append(us)
        series["accuracy_percent"].append(accuracy)
        ratios = [pair["mean_host_ratio"] for pair in record.paired if pair["role"] == "bare"]
        series["over_bare"].append(ratios[0] if ratios else None)
    batch = records[0].cell["batch"]
    return {"batch": batch, "full": full, "runners": runners, "front": _front(full, runners)}


def _front(full: dict[str, dict[str, float]], runners: dict[str, dict[str, list[Any]]]) -> list[list[float]]:
    """Return the Pareto front as [microseconds, percent], the soonest first."""
    points = [(one["mean_us"], one["accuracy_percent"]) for one in full.values()]
    for series in runners.values():
        points += zip(series["mean_us"], series["accuracy_percent"], strict=True)
    front: list[list[float]] = []
    for us, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if not front or accuracy > front[-1][1]:
            front.append([us, accuracy])
    return front


def _title(panels: Sequence[dict[str, Any]]) -> str:
    found = []
    for panel in panels:
        least = panel["full"][GRAPH]["accuracy_percent"] - LOSS - 1e-9
        ratio, name = min(
            (
                (ratio, name)
                for name, series in panel["runners"].items()
                for ratio, accuracy in zip(series["over_bare"], series["accuracy_percent"], strict=True)
                if ratio is not None and accuracy >= least
            ),
            default=(1.0, ""),
        )
        sooner = f"{1 / ratio:.2g} times sooner ({name})" if ratio < 0.99 else "no sooner"
        found.append(f"{sooner} at batch {panel['batch']}")
    return f"For at most {LOSS} points of accuracy, answers come\n" + ", ".join(found)


def _stamp(records: Sequence[Record], panels: Sequence[dict[str, Any]]) -> str:
    cell, protocol = records[0].cell, records[0].protocol
    measured = next(record.measured for record in records if record.measured is not None)
    size, samples = "x".join(map(str, cell["input"][1:])), measured["samples"]
    trunks = sorted({record.variant.partition("@")[2] for record in records if not record.variant.startswith("eager")})
    of_eager = [(panel["full"][EAGER], panel["batch"]) for panel in panels if EAGER in panel["full"]]
    eager = [f"{one['mean_us']:,.0f} us at batch {batch}" for one, batch in of_eager]
    return stamp(
        records,
        f"{protocol['data']}, {size} px, {cell['model']}, {cell['dtype']}, {len(cell['taps'])} heads, trunk "
        f"{', '.join(trunks)}; accuracy of {samples:,} test images, one of them is {100 / samples:.2g} points",
        "time: host, from the call on an idle device until the answer is there, runners in turns; mean over the test "
        "split of each exit's median",
        "numbers beside points: percentage points of accuracy that the thresholds may cost on the validation split",
        f"not drawn: what costs more than {_SHOWN:.0f} points"
        + (f", and the full network, eager: {', '.join(eager)}" if eager else ""),
        *sorted({f"failed: {record.variant}: {record.error}" for record in records if record.error is not None}),
    )


def pareto_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw a panel a batch size, accuracy over the time to the answer in each."""
    panels = numbers["panels"]
    figure = new_figure(4.8)
    legend, row = row_of_panels(figure, (1.0, 0.13), len(panels))
    for axes, panel in zip(row, panels, strict=True):
        _draw_panel(axes, panel)
    row[0].set_ylabel("accuracy on the test split, %")
    legend_beside(legend, row[0], 3)
    return frame(figure, numbers)


def _draw_panel(axes: Axes, panel: dict[str, Any]) -> None:
    front = zip(*panel["front"], strict=True)
    axes.step(*front, where="post", color=PALE, linewidth=6, zorder=1, label="Pareto front")
    measured = {**panel["runners"], **panel["full"]}
    for name in (one for one in LINES if one in measured):
        size, zorder = (8, 4) if name == GRAPH else (6, 3)
        us, accuracy = measured[name]["mean_us"], measured[name]["accuracy_percent"]
        axes.plot(us, accuracy, **LINES[name].looks, markersize=size, linewidth=1, zorder=zorder)
    _label_thresholds(axes, panel)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(NullFormatter())
    times = [panel["full"][GRAPH]["mean_us"]]
    for series in panel["runners"].values():
        points = zip(series["mean_us"], series["accuracy_percent"], strict=True)
        times += [us for us, accuracy in points if accuracy >= _least(panel)]
    low, high = min(times) / 1.2, max(times) * 1.2
    round_numbers = [digit * 10**power for power in range(6) for digit in (1, 1.5, 2, 3, 4, 6, 8)]
    ticks = [number for number in round_numbers if low < number < high]
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    ylim = (_least(panel), panel["full"][GRAPH]["accuracy_percent"] + 0.15 * _SHOWN)
    xlabel = "mean time to the answer, us (log)"
    tidy(axes, "both", f"batch {panel['batch']}", xlim=(low, high), ylim=ylim, xlabel=xlabel)


def _label_thresholds(axes: Axes, panel: dict[str, Any]) -> None:
    """Label the points of the soonest runner with their thresholds; points on top of each other share a label."""
    series = min(panel["runners"].values(), key=lambda one: min(one["mean_us"]))
    labels: list[tuple[list[str], float, float]] = []
    points = zip(series["thresholds"], series["mean_us"], series["accuracy_percent"], strict=True)
    for thresholds, us, accuracy in points:
        name = thresholds.removeprefix("calibrated ").removesuffix(" %")
        if labels and labels[-1][2] == accuracy and abs(math.log(us / labels[-1][1])) < _TOO_CLOSE:
            labels[-1][0].append(name)
        elif accuracy >= _least(panel):
            labels.append(([name], us, accuracy))
    for names, us, accuracy in labels:
        later = us > panel["full"][GRAPH]["mean_us"]  # to the right nothing is in the way
        offset, ha = (6, "left") if later else (-5, "right")
        note(axes, ", ".join(names), (us, accuracy), (offset, -5), fontsize=8, color=GREY, ha=ha, va="top")


def _least(panel: dict[str, Any]) -> float:
    """Return the accuracy below which nothing is drawn, percent."""
    return float(panel["full"][GRAPH]["accuracy_percent"] - _SHOWN)
