"""Figures of reports: "exits", of ``auxhead demo``, and "calibration", of ``auxhead calibrate``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...autotune.records.checks import NUMBER, TEXT, TRUTH, WHOLE, Maybe, Value, checker
from ...autotune.records.record import BadRecord
from ...model.basics.files import parse_json
from ..records import Known, NoRecords
from ..style import BLUE, GREEN, GREY, ORANGE, SKY, frame, new_figure, note, tidy

_NULL_OR_NUMBER, _NULL_OR_TEXT = (Maybe(form, absent=False) for form in (NUMBER, TEXT))
_RELIABILITY = {"ece": NUMBER, "samples": [WHOLE], **dict.fromkeys(("confidence", "accuracy"), [_NULL_OR_NUMBER])}


def _numbers_of(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, NUMBER)


_MAYBE = dict.fromkeys(("threshold", "accuracy"), _NULL_OR_NUMBER)
_EXIT = {"name": TEXT, **_MAYBE, **_numbers_of("share", "accuracy_on_all")}
_LATENCIES = {"milliseconds": [NUMBER], "batch_size": WHOLE}
_POINT = {**_numbers_of("work", "accuracy"), "interval": [NUMBER], "latency_ms": _NULL_OR_NUMBER}
_ANSWERS = {"path": [_POINT], "budgeted": [_POINT]}
#: By kind: the command that writes such reports, their format, and all that is read of them.
_REPORTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "demo": (
        "auxhead demo",
        "auxhead demo report 1",
        {
            "data": TEXT,
            **dict.fromkeys(("image_size", "seed"), WHOLE),
            "images": dict.fromkeys(("train", "validation", "test"), WHOLE),
            **_numbers_of("accuracy", "full_accuracy", "left_before_last_block"),
            "exits": [{**_EXIT, "images": WHOLE}],
            "environment": dict.fromkeys(("device", "python", "torch", "torchvision", "auxhead"), _NULL_OR_TEXT),
        },
    ),
    "calibrate": (
        "auxhead calibrate",
        "auxhead calibration report 1",
        {
            "data": _NULL_OR_TEXT,
            "samples": dict.fromkeys(("temperature", "thresholds", "test"), WHOLE),
            "bound": {**_numbers_of("confidence", "max_accuracy_drop"), "reachable": TRUTH, "unknown": Maybe(TEXT)},
            **_numbers_of("accuracy", "full_accuracy", "mean_exit"),
            "expected_latency_ms": _NULL_OR_NUMBER,
            "chosen": WHOLE,
            "exits": [{**_EXIT, "samples": WHOLE, "before": _RELIABILITY, "after": _RELIABILITY}],
            "latencies": Maybe({**_LATENCIES, "runner": TEXT, "device": TEXT}, absent=False),
            "curve": [{**_numbers_of("accuracy", "mean_exit"), "latency_ms": _NULL_OR_NUMBER}],
            "environment": dict.fromkeys(("device", "python", "torch", "auxhead"), _NULL_OR_TEXT),
        },
    ),
    "curve": (
        "auxhead calibrate --curve",
        "auxhead anytime curve 1",
        {
            "data": _NULL_OR_TEXT,
            "samples": dict.fromkeys(("temperature", "thresholds", "test"), WHOLE),
            "confidence": NUMBER,
            "unknown": _NULL_OR_TEXT,
            "flops": _NULL_OR_NUMBER,
            "exits": [{"name": TEXT, **_numbers_of("work", "accuracy"), "latency_ms": _NULL_OR_NUMBER}],
            "alone": _ANSWERS,
            "latencies": Maybe({**_LATENCIES, "runner": TEXT, "device": TEXT}, absent=False),
            "environment": dict.fromkeys(("device", "python", "torch", "auxhead"), _NULL_OR_TEXT),
        },
    ),
}
_SOME = Value("an exit or more", bool)


def read(paths: Sequence[Path], kinds: Sequence[str], known: Known) -> dict[str, Any]:
    """Read the one report of a kind, of ``_REPORTS``, in some files; those of other kinds are passed over.

    Raises:
        NoRecords: there is no such file.
        BadRecord: several reports, or a file that is none.
    """
    made_by, wanted, form = _REPORTS[kinds[0]]
    others = {other for kind, (_, other, _) in _REPORTS.items() if kind != kinds[0]}
    own = [(path, content) for path in paths if (content := _read(path)).get("format") not in others]
    if not own:
        raise NoRecords(f"{', '.join(map(str, paths))}: got reports of other commands")
    if len(own) > 1:
        raise BadRecord(f"{', '.join(str(path) for path, _ in own)}: got {len(own)} reports, wants one")
    ((path, content),) = own
    if content.get("format") != wanted:
        got = content.get("format")
        raise BadRecord(f"{path}: format: got {got!r:.60}, wants {wanted!r}, as `{made_by}` writes it")
    try:
        checker(form)(content)
        checker({"exits": _SOME})(content)
    except ValueError as error:
        raise BadRecord(f"{path}: {error}") from None
    return content


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NoRecords(f"{path}: no such file, wants a report.json") from None
    except OSError as error:
        raise BadRecord(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BadRecord(f"{path}: is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise BadRecord(f"{path}: holds a JSON {type(content).__name__}, wants an object")
    return content


def exits_numbers(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many images leave at each exit, and how many of them are right; in percent."""
    exits = report["exits"]
    early, full = 100 * report["accuracy"], 100 * report["full_accuracy"]
    machine = report["environment"]
    images = report["images"]
    return {
        "title": (
            f"{100 * report['left_before_last_block']:.1f} % of the images leave before the last block;\n"
            f"accuracy {early:.1f} % against {full:.1f} % for the full network"
        ),
        "exits": [line["name"] for line in exits],
        "never": [line["threshold"] is not None and line["threshold"] >= 1.0 for line in exits],
        "images": [line["images"] for line in exits],
        "share_percent": [100 * line["share"] for line in exits],
        "accuracy_percent": [None if line["accuracy"] is None else 100 * line["accuracy"] for line in exits],
        "accuracy_on_all_percent": [100 * line["accuracy_on_all"] for line in exits],
        "full_accuracy_percent": full,
        "early_exit_accuracy_percent": early,
        "stamp": (
            f"{report['data']}, {report['image_size']}x{report['image_size']} px, ResNet-18 for small images, "
            f"seed {report['seed']}; images: train {images['train']:,}, validation {images['validation']:,}, "
            f"test {images['test']:,} (shown)\n"
            f"{machine['device']}, Python {machine['python']}, torch {machine['torch']}, "
            f"torchvision {machine['torchvision']}, auxhead {machine['auxhead']}"
        ),
    }


def exits_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw shares above, and accuracies below."""
    figure = new_figure(5.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1))
    places = range(len(numbers["exits"]))
    above.bar(places, numbers["share_percent"], color=BLUE, width=0.62)
    shares = zip(places, numbers["share_percent"], numbers["images"], numbers["never"], strict=True)
    for place, share, images, never in shares:
        text = "no exit" if never else f"{share:.1f} %\n({images:,})"
        note(above, text, (place, share), (0, 3), ha="center", color=GREY if never else "black")
    tidy(above, ylabel="images that leave here,\n% of all (count)", ylim=(0, 1.35 * max(numbers["share_percent"])))
    below.plot(
        places, numbers["accuracy_on_all_percent"], "o--", color=GREY, markerfacecolor="white",
        label="exit, if it answered all",
    )  # fmt: skip
    answering = [place for place in places if numbers["accuracy_percent"][place] is not None]
    accuracies = [numbers["accuracy_percent"][place] for place in answering]
    below.plot(answering, accuracies, "o", color=ORANGE, markersize=8, label="images that leave here")
    for place, accuracy in zip(answering, accuracies, strict=True):
        # the number must not cover the other point
        offset, va = (7, "bottom") if accuracy >= numbers["accuracy_on_all_percent"][place] else (-7, "top")
        note(below, f"{accuracy:.1f}", (place, accuracy), (0, offset), ha="center", va=va, color=ORANGE)
    below.axhline(numbers["full_accuracy_percent"], color="black", linewidth=1, label="full network")
    low = min(99.0, *numbers["accuracy_on_all_percent"], *accuracies)
    bottom = low - 0.08 * (100.0 - low)
    below.set_ylim(max(-2.0, bottom), 100.0 + 0.2 * (100.0 - low))
    below.set_yticks([tick for tick in below.get_yticks() if bottom <= tick <= 100.0])
    below.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    below.set_xticks(list(places), numbers["exits"])
    xlabel = "exit, in the order in which the network runs (head behind a block; last, the classifier)"
    tidy(below, xlabel=xlabel, ylabel="accuracy, %")
    return frame(figure, numbers)


def calibration_numbers(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return confidences by exit, where samples leave, and the thresholds' candidates; in percent."""
    exits, bound, samples, machine = report["exits"], report["bound"], report["samples"], report["environment"]
    latencies = report["latencies"]
    confidence, most = f"{100 * bound['confidence']:g} %", f"{100 * bound['max_accuracy_drop']:.2f} points"
    promise = f"of new samples like these it loses {most} at most, with {confidence} confidence"
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
            f"thresholds {samples['thresholds']:,} (lower middle), test {samples['test']:,} (all else)\n"
            f"{machine['device']}, Python {machine['python']}, torch {machine['torch']}, auxhead {machine['auxhead']}"
            + ("" if latencies is None else f"; {latencies['runner']} on {latencies['device']}")
        ),
    }


def _bins(reliability: Mapping[str, Any]) -> list[list[float]]:
    """Return confidence, accuracy and number of samples of the bins that have any."""
    bins = zip(reliability["confidence"], reliability["accuracy"], reliability["samples"], strict=True)
    return [[100 * confidence, 100 * right, count] for confidence, right, count in bins if count]


def calibration_figure(numbers: Mapping[str, Any]) -> Figure:
    """Draw confidences before and after temperatures, exits, and accuracy against the time to the answer."""
    figure = new_figure(6.4)
    rows = figure.add_gridspec(2, 1)
    above, below = rows[0].subgridspec(1, 2), rows[1].subgridspec(1, 3, width_ratios=(1.6, 1, 1))
    before, after = (figure.add_subplot(above[0, place]) for place in range(2))
    shares, curve, tested = (figure.add_subplot(below[0, place]) for place in range(3))
    for axes, when in ((before, "before"), (after, "after")):
        _reliability(axes, numbers["reliability"][when], f"{when} temperatures")
    places = range(len(numbers["exits"]))
    shares.bar(places, numbers["share_percent"], color=BLUE, width=0.62)
    for place, share, count in zip(places, numbers["share_percent"], numbers["samples"], strict=True):
        note(shares, f"{count:,}", (place, share), (0, 2), ha="center", fontsize=8)
    shares.set_xticks(list(places), numbers["exits"], rotation=60, fontsize=8)
    tidy(shares, ylabel="samples that leave here, %", ylim=(0, 1.2 * max(numbers["share_percent"])))
    _curves(curve, tested, numbers)
    return frame(figure, numbers)


def _reliability(axes: Axes, exits: Sequence[Sequence[Sequence[float]]], title: str) -> None:
    axes.plot([0, 100], [0, 100], color="black", linewidth=1)
    for index, bins in enumerate(exits):
        last = index == len(exits) - 1
        label = "classifier" if last else "heads" if index == 0 else None
        confidence, right, samples = zip(*bins, strict=True)
        colour, areas = ORANGE if last else GREY, [max(3.0, 120 * count / sum(samples)) for count in samples]
        axes.scatter(confidence, right, areas, color=colour, alpha=0.6, linewidths=0, label=label)
    axes.legend(frameon=False, fontsize=7)
    tidy(axes, "both", f"{title} (area: samples)", xlabel="confidence, %", ylabel="right, %")


def _curves(chosen: Axes, tested: Axes, numbers: Mapping[str, Any]) -> None:
    """Draw accuracies of the split that thresholds are chosen on, and of the test split, in places of their own."""
    static, curve = numbers["static"], numbers["curve"]
    chosen.plot(*zip(*curve, strict=True), ".-", color=SKY, linewidth=0.8, label="candidates")
    chosen.plot(*curve[numbers["chosen"]], "s", color=BLUE, markersize=5, label="the chosen one")
    tested.plot(*zip(*static, strict=True), "o", color=GREY, markerfacecolor="white", label="all stop at one exit")
    tested.plot(*numbers["early_exit"], "D", color=GREEN, label="early exit, as chosen")
    seen = [accuracy for _, accuracy in (*curve[: numbers["chosen"] + 1], static[-1], numbers["early_exit"])]
    titles = {chosen: "split for thresholds", tested: "test split"}
    for axes, title in titles.items():
        axes.set_ylim(max(0.0, 100.0 - max(2.0, 3 * (100.0 - min(seen)))), 100.5)
        axes.legend(frameon=False, fontsize=7)
        tidy(axes, "both", title, xlabel=numbers["unit"], ylabel="accuracy, %")
