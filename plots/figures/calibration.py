"""Figure "calibration": confidences before and after temperatures, exits on the test split, accuracy against exit."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...autotune.records.checks import NUMBER, TEXT, TRUTH, WHOLE, Maybe
from ..records import Known, read_one_report
from ..style import BLUE, GREEN, GREY, ORANGE, SKY, frame, new_figure, note, tidy

_NULL_OR_NUMBER = Maybe(NUMBER, absent=False)
_RELIABILITY = {"ece": NUMBER, "samples": [WHOLE], **dict.fromkeys(("confidence", "accuracy"), [_NULL_OR_NUMBER])}
#: All that it reads of a report.
_REPORT = {
    "data": Maybe(TEXT, absent=False),
    "samples": dict.fromkeys(("temperature", "thresholds", "test"), WHOLE),
    "bound": {"confidence": NUMBER, "max_accuracy_drop": NUMBER, "reachable": TRUTH, "unknown": Maybe(TEXT)},
    **dict.fromkeys(("accuracy", "full_accuracy", "mean_exit"), NUMBER),
    "expected_latency_ms": _NULL_OR_NUMBER,
    "chosen": WHOLE,
    "exits": [
        {
            "name": TEXT,
            "samples": WHOLE,
            "threshold": _NULL_OR_NUMBER,
            **dict.fromkeys(("share", "accuracy_on_all"), NUMBER),
            "accuracy": _NULL_OR_NUMBER,
            **dict.fromkeys(("before", "after"), _RELIABILITY),
        }
    ],
    "latencies": Maybe({"milliseconds": [NUMBER], "batch_size": WHOLE, "runner": TEXT, "device": TEXT}, absent=False),
    "curve": [{**dict.fromkeys(("accuracy", "mean_exit"), NUMBER), "latency_ms": _NULL_OR_NUMBER}],
    "environment": dict.fromkeys(("device", "python", "torch", "auxhead"), Maybe(TEXT, absent=False)),
}


def read(paths: Sequence[Path], kinds: Sequence[str], known: Known) -> dict[str, Any]:
    """Read one report.json of ``auxhead calibrate``; ``kinds`` and ``known`` are for records."""
    return read_one_report(paths, "auxhead calibrate", _REPORT)


def draw(report: Mapping[str, Any]) -> tuple[Figure, dict[str, Any]]:
    """Draw the figure, and return it with the numbers in it."""
    drawn = _drawn(report)
    return _figure(drawn), drawn


def _drawn(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that the figure shows; shares, accuracies and confidences in percent."""
    exits, bound, samples, machine = report["exits"], report["bound"], report["samples"], report["environment"]
    latencies = report["latencies"]
    sure, most = f"{100 * bound['confidence']:g} %", f"{100 * bound['max_accuracy_drop']:.2f} points"
    promise = f"with {sure} confidence it drops by {most} at most"
    if bound.get("unknown") is not None:
        promise = "nothing is promised: it is not known what it learned from"
    return {
        "title": (
            f"{100 * (1 - exits[-1]['share']):.1f} % leave early; accuracy {100 * report['accuracy']:.1f} % against "
            f"{100 * report['full_accuracy']:.1f} % for the full network;\n{promise}"
        ),
        "exits": [one["name"] for one in exits],
        "share_percent": [100 * one["share"] for one in exits],
        "samples": [one["samples"] for one in exits],
        "ece_percent": {when: [100 * one[when]["ece"] for one in exits] for when in ("before", "after")},
        "reliability": {when: [_bins(one[when]) for one in exits] for when in ("before", "after")},
        "unit": "mean exit index" if latencies is None else f"ms to the answer, batch {latencies['batch_size']}",
        "curve": [
            [one["mean_exit"] if latencies is None else one["latency_ms"], 100 * one["accuracy"]]
            for one in report["curve"]
        ],
        "chosen": report["chosen"],
        "early_exit": [
            report["mean_exit"] if latencies is None else report["expected_latency_ms"],
            100 * report["accuracy"],
        ],
        "static": [
            [index if latencies is None else latencies["milliseconds"][index], 100 * one["accuracy_on_all"]]
            for index, one in enumerate(exits)
        ],
        "stamp": (
            f"{report['data'] or 'data without a name'}; samples for temperatures {samples['temperature']:,} and "
            f"thresholds {samples['thresholds']:,} (lower right), test {samples['test']:,} (all else)\n"
            f"{machine['device']}, Python {machine['python']}, torch {machine['torch']}, auxhead {machine['auxhead']}"
            + ("" if latencies is None else f"; {latencies['runner']} on {latencies['device']}")
        ),
    }


def _bins(reliability: Mapping[str, Any]) -> list[list[float]]:
    """Return confidence, accuracy and number of samples of the bins that have any."""
    bins = zip(reliability["confidence"], reliability["accuracy"], reliability["samples"], strict=True)
    return [[100 * sure, 100 * right, count] for sure, right, count in bins if count]


def _figure(drawn: Mapping[str, Any]) -> Figure:
    figure = new_figure(6.4)
    (before, after), (shares, curve) = figure.subplots(2, 2)
    for axes, when in ((before, "before"), (after, "after")):
        _reliability(axes, drawn["reliability"][when], f"{when} temperatures")
    places = range(len(drawn["exits"]))
    shares.bar(places, drawn["share_percent"], color=BLUE, width=0.62)
    for place, share, count in zip(places, drawn["share_percent"], drawn["samples"], strict=True):
        note(shares, f"{count:,}", (place, share), (0, 2), ha="center", fontsize=8)
    shares.set_ylabel("samples that leave here, %")
    shares.set_ylim(0, 1.2 * max(drawn["share_percent"]))
    shares.set_xticks(list(places), drawn["exits"], rotation=60, fontsize=8)
    tidy(shares)
    _curve(curve, drawn)
    return frame(figure, drawn)


def _reliability(axes: Axes, exits: Sequence[Sequence[Sequence[float]]], title: str) -> None:
    axes.plot([0, 100], [0, 100], color="black", linewidth=1)
    for index, bins in enumerate(exits):
        last = index == len(exits) - 1
        label = "classifier" if last else "heads" if index == 0 else None
        sure, right, samples = zip(*bins, strict=True)
        colour, areas = ORANGE if last else GREY, [max(3.0, 120 * count / sum(samples)) for count in samples]
        axes.scatter(sure, right, areas, color=colour, alpha=0.6, linewidths=0, label=label)
    axes.set_title(f"{title} (area: samples)", loc="left", fontsize=10)
    axes.set_xlabel("confidence, %")
    axes.set_ylabel("right, %")
    axes.legend(frameon=False, fontsize=7)
    tidy(axes, "both")


def _curve(axes: Axes, drawn: Mapping[str, Any]) -> None:
    static, curve = drawn["static"], drawn["curve"]
    axes.plot(*zip(*curve, strict=True), ".-", color=SKY, linewidth=0.8, label="candidates, split for thresholds")
    axes.plot(*curve[drawn["chosen"]], "s", color=BLUE, markersize=5, label="the chosen one there")
    axes.plot(*zip(*static, strict=True), "o", color=GREY, markerfacecolor="white", label="all stop at one exit, test")
    axes.plot(*drawn["early_exit"], "D", color=GREEN, label="early exit, test")
    seen = [accuracy for _, accuracy in (*curve[: drawn["chosen"] + 1], static[-1], drawn["early_exit"])]
    axes.set_ylim(max(0.0, 100.0 - max(2.0, 3 * (100.0 - min(seen)))), 100.5)
    axes.set_xlabel(drawn["unit"])
    axes.set_ylabel("accuracy, %")
    axes.legend(frameon=False, fontsize=7)
    tidy(axes, "both")
